// The part of libtorch that tch leaves out, behind a C interface for ../src/shim.rs: the key-value store and the process groups of
// c10d (torch/csrc/distributed/c10d in https://github.com/pytorch/pytorch), the fused AdamW, and CUDA's device and memory statistics.
//
// Every function returns OK, FAILED with a message in dh_error(), or NOT_BUILT where a header was absent when this was compiled.
// Handles are owned by the caller, who gives each back to its own ..._free. A `Tensor*` is what tch calls C_tensor.

#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include <ATen/ATen.h>
#include <ATen/ops/_fused_adamw.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/Logging.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>
#ifdef USE_C10D_GLOO
#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>
#endif
#ifdef USE_C10D_NCCL
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAFunctions.h>
#include <torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp>
#endif

using at::Tensor;
using std::chrono::milliseconds;

namespace {

enum Status { OK = 0, FAILED = 1, NOT_BUILT = 2 };

thread_local std::string last_error;

struct Store {
  c10::intrusive_ptr<c10d::Store> store;
};

struct Group {
  c10::intrusive_ptr<c10d::Backend> backend;
};

// A collective that was started, with the tensors it reads and writes, which live at least as long as it runs.
struct Work {
  c10::intrusive_ptr<c10d::Work> work;
  Tensor input, output;
};

template <class Body>
int guarded(Body body) {
  try {
    body();
    return OK;
  } catch (const c10::Error& error) {
    last_error = error.what_without_backtrace();
  } catch (const std::exception& error) {
    last_error = error.what();
  } catch (...) {
    last_error = "an exception without a message";
  }
  return FAILED;
}

// Memory that the caller frees with dh_free.
void give(const void* bytes, size_t length, uint8_t** out, size_t* out_length) {
  auto* copy = static_cast<uint8_t*>(std::malloc(length + 1));
  TORCH_CHECK(copy != nullptr, "out of memory");
  if (length > 0) std::memcpy(copy, bytes, length);
  *out = copy;
  *out_length = length;
}

template <class Start>
int start(Work** out, Tensor input, Tensor output, Start collective) {
  return guarded([&] {
    at::NoGradGuard no_grad;
    auto work = collective(input, output);
    *out = new Work{std::move(work), std::move(input), std::move(output)};
  });
}

std::vector<Tensor> listed(Tensor* const* tensors, size_t count) {
  std::vector<Tensor> list;
  list.reserve(count);
  for (size_t i = 0; i < count; ++i) list.push_back(*tensors[i]);
  return list;
}

} // namespace

extern "C" {

const char* dh_error() { return last_error.c_str(); }

void dh_free(uint8_t* bytes) { std::free(bytes); }

// c10d reports on stderr, with C++ stack traces, what it then throws as well. TORCH_CPP_LOG_LEVEL brings the reports back.
void dh_quiet() {
  if (std::getenv("TORCH_CPP_LOG_LEVEL") == nullptr) FLAGS_caffe2_log_level = 3;
}

// ---- The store ----

int dh_store_open(const char* host, uint16_t port, int serve, int64_t timeout_ms, Store** out) {
  return guarded([&] {
    c10d::TCPStoreOptions options;
    options.port = port;
    options.isServer = serve != 0;
    options.waitWorkers = false;
    options.timeout = milliseconds(timeout_ms);
    *out = new Store{c10::make_intrusive<c10d::TCPStore>(host, options)};
  });
}

int dh_store_set(Store* store, const char* key, const uint8_t* bytes, size_t length) {
  return guarded([&] { store->store->set(key, std::vector<uint8_t>(bytes, bytes + length)); });
}

int dh_store_add(Store* store, const char* key, int64_t amount, int64_t* out) {
  return guarded([&] { *out = store->store->add(key, amount); });
}

int dh_store_has(Store* store, const char* key, int* out) {
  return guarded([&] { *out = store->store->check({key}) ? 1 : 0; });
}

int dh_store_get(Store* store, const char* key, uint8_t** out, size_t* out_length) {
  return guarded([&] {
    auto value = store->store->get(key);
    give(value.data(), value.size(), out, out_length);
  });
}

// The values of several keys that exist, one a line.
int dh_store_get_lines(Store* store, const char* const* keys, size_t count, uint8_t** out, size_t* out_length) {
  return guarded([&] {
    std::string lines;
    for (const auto& value : store->store->multiGet(std::vector<std::string>(keys, keys + count))) {
      lines.append(value.begin(), value.end());
      lines.push_back('\n');
    }
    give(lines.data(), lines.size(), out, out_length);
  });
}

void dh_store_free(Store* store) { delete store; }

// ---- Process groups ----

// `host` is the address on which the other ranks reach this one; empty leaves the choice to c10d (GLOO_SOCKET_IFNAME, else the host name).
int dh_group_gloo(Store* store, const char* prefix, int rank, int world, const char* host, int64_t timeout_ms, Group** out) {
#ifdef USE_C10D_GLOO
  return guarded([&] {
    using c10d::ProcessGroupGloo;
    auto timeout = milliseconds(timeout_ms);
    auto options = *host ? ProcessGroupGloo::Options::create(timeout) : ProcessGroupGloo::Options::create_default(timeout);
    if (*host) options->devices.push_back(ProcessGroupGloo::createDeviceForHostname(host));
    auto prefixed = c10::make_intrusive<c10d::PrefixStore>(prefix, store->store);
    *out = new Group{c10::make_intrusive<ProcessGroupGloo>(prefixed, rank, world, options)};
  });
#else
  return NOT_BUILT;
#endif
}

// Errors of NCCL are looked after by the caller: c10d's own handling ends the process with a C++ stack trace.
int dh_group_nccl(Store* store, const char* prefix, int rank, int world, int device, int64_t timeout_ms, Group** out) {
#ifdef USE_C10D_NCCL
  return guarded([&] {
    setenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0", 1);
    setenv("TORCH_NCCL_DUMP_ON_TIMEOUT", "0", 0);
    TORCH_CHECK(c10::cuda::current_device() == device, "cuda:", device, " is not the current device");
    auto options = c10d::ProcessGroupNCCL::Options::create();
    options->timeout = milliseconds(timeout_ms);
    auto prefixed = c10::make_intrusive<c10d::PrefixStore>(prefix, store->store);
    *out = new Group{c10::make_intrusive<c10d::ProcessGroupNCCL>(prefixed, rank, world, options)};
  });
#else
  return NOT_BUILT;
#endif
}

// Ends what is under way; it then fails instead of waiting. Gloo has no such thing: there a time-out ends it.
int dh_group_abort(Group* group) {
  return guarded([&] { group->backend->abort(); });
}

int dh_group_shutdown(Group* group) {
  return guarded([&] { group->backend->shutdown(); });
}

void dh_group_free(Group* group) { delete group; }

int dh_all_gather(Group* group, const Tensor* shard, Work** out) {
  Tensor input, output;
  int status = guarded([&] {
    input = shard->detach().contiguous().view({-1});
    output = at::empty({group->backend->getSize() * input.numel()}, input.options());
  });
  if (status != OK) return status;
  return start(out, input, output, [&](Tensor& in, Tensor& to) { return group->backend->_allgather_base(to, in); });
}

int dh_reduce_scatter(Group* group, const Tensor* whole, Work** out) {
  Tensor input, output;
  int status = guarded([&] {
    input = whole->detach().contiguous().view({-1});
    int64_t world = group->backend->getSize();
    TORCH_CHECK(input.numel() % world == 0, input.numel(), " values cannot be shared out evenly among ", world, " ranks");
    output = at::empty({input.numel() / world}, input.options());
  });
  if (status != OK) return status;
  return start(out, input, output, [&](Tensor& in, Tensor& to) { return group->backend->_reduce_scatter_base(to, in); });
}

int dh_all_reduce(Group* group, const Tensor* values, Work** out) {
  return start(out, *values, *values, [&](Tensor& in, Tensor&) {
    std::vector<Tensor> tensors{in};
    return group->backend->allreduce(tensors);
  });
}

// Gloo: blocks until the result is there. NCCL: makes the current stream wait for it.
int dh_work_wait(Work* work) {
  return guarded([&] { work->work->wait(); });
}

int dh_work_is_done(Work* work, int* out) {
  return guarded([&] {
    *out = work->work->isCompleted() ? 1 : 0;
    if (*out && work->work->exception()) std::rethrow_exception(work->work->exception());
  });
}

// The tensor is the caller's, as one that tch made.
int dh_work_output(Work* work, Tensor** out) {
  return guarded([&] { *out = new Tensor(work->output); });
}

void dh_work_free(Work* work) { delete work; }

// ---- The optimiser ----

int dh_fused_adamw(Tensor* const* params, Tensor* const* grads, Tensor* const* exp_avgs, Tensor* const* exp_avg_sqs, size_t count,
                   double step, double learning_rate, double beta1, double beta2, double weight_decay, double epsilon,
                   double gradient_scale) {
  return guarded([&] {
    if (count == 0) return;
    at::NoGradGuard no_grad;
    auto options = params[0]->options().dtype(at::kFloat);
    std::vector<Tensor> steps(count, at::full({}, step, options));
    // The kernel divides by it.
    std::optional<Tensor> scale;
    if (gradient_scale != 1.0) scale = at::full({}, 1.0 / gradient_scale, options);
    at::_fused_adamw_(listed(params, count), listed(grads, count), listed(exp_avgs, count), listed(exp_avg_sqs, count), {}, steps,
                      learning_rate, beta1, beta2, weight_decay, epsilon, /*amsgrad=*/false, /*maximize=*/false, scale);
  });
}

// ---- CUDA ----

int dh_cuda_set_device(int device) {
#ifdef USE_C10D_NCCL
  return guarded([&] { c10::cuda::set_device(static_cast<c10::DeviceIndex>(device)); });
#else
  return NOT_BUILT;
#endif
}

// Through the interface that every device has, so that a program built without CUDA's headers can do it where libtorch has CUDA.
int dh_cuda_own_stream(int device) {
  return guarded([&] {
    c10::impl::VirtualGuardImpl cuda(c10::DeviceType::CUDA);
    auto index = static_cast<c10::DeviceIndex>(device);
    // What other threads have written to the device is there before this stream begins.
    cuda.synchronizeDevice(index);
    cuda.exchangeStream(cuda.getStreamFromGlobalPool(c10::Device(c10::DeviceType::CUDA, index)));
  });
}

int dh_cuda_peak_bytes(int device, uint64_t* out) {
#ifdef USE_C10D_NCCL
  return guarded([&] {
    auto stats = c10::cuda::CUDACachingAllocator::getDeviceStats(static_cast<c10::DeviceIndex>(device));
    *out = static_cast<uint64_t>(stats.allocated_bytes[0].peak);
  });
#else
  return NOT_BUILT;
#endif
}

} // extern "C"

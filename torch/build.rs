//! Compiles shim/shim.cpp against the libtorch in use, with Gloo where its headers are, with NCCL where the feature asks for it.

use std::path::{Path, PathBuf};

#[path = "../build.rs"]
mod link;

/// Headers that ProcessGroupNCCL.hpp needs, and the Python package that holds each.
const CUDA_HEADERS: [(&str, &str); 4] = [
    ("nccl.h", "nvidia-nccl-cu13"),
    ("cuda_runtime_api.h", "nvidia-cuda-runtime==13.0.*"),
    ("crt/host_defines.h", "nvidia-cuda-crt==13.0.*"),
    ("nv/target", "nvidia-cuda-cccl==13.0.*"),
];

fn main() {
    link::main();
    println!("cargo:rerun-if-changed=shim/shim.cpp");
    for variable in ["LIBTORCH_INCLUDE", "DRAFTHORSE_CUDA_INCLUDE", "DRAFTHORSE_GLOO_INCLUDE"] {
        println!("cargo:rerun-if-env-changed={variable}");
    }
    if let Err(message) = compile() {
        // A panic would bury it under a back-trace.
        println!("cargo::error={message}");
    }
}

fn compile() -> Result<(), String> {
    let lib = std::env::var("DEP_TCH_LIBTORCH_LIB").map(PathBuf::from);
    let lib = lib.map_err(|_| "torch-sys does not say where libtorch is: run `make setup` or set LIBTORCH".to_string())?;
    let root = lib.parent().map_or_else(|| lib.clone(), Path::to_path_buf);
    let include = std::env::var("LIBTORCH_INCLUDE").map_or_else(|_| root.clone(), PathBuf::from).join("include");

    let mut build = cc::Build::new();
    build.cpp(true).std("c++17").pic(true).warnings(false).opt_level(1).debug(false).file("shim/shim.cpp");
    build.include(&include).include(include.join("torch/csrc/api/include"));

    let gloo = std::env::var("DRAFTHORSE_GLOO_INCLUDE").map_or_else(|_| PathBuf::from("/usr/include"), PathBuf::from);
    println!("cargo:rerun-if-changed={}", gloo.join("gloo/config.h").display());
    println!("cargo:rustc-check-cfg=cfg(gloo)");
    if gloo.join("gloo/config.h").exists() {
        println!("cargo:rustc-cfg=gloo");
        build.define("USE_C10D_GLOO", None).flag(format!("-idirafter{}", gloo.display()));
    }
    let with_nccl = std::env::var_os("CARGO_FEATURE_NCCL").is_some();
    if with_nccl {
        if !lib.join("libtorch_cuda.so").exists() {
            return Err(format!(
                "the feature `nccl` needs a libtorch with CUDA, and {} has none: `pip install torch==2.11.0` and set LIBTORCH to its \
                 folder site-packages/torch",
                lib.display()
            ));
        }
        let folders = cuda_folders(&root);
        let absent: Vec<_> = CUDA_HEADERS.iter().filter(|(header, _)| !folders.iter().any(|f| f.join(header).exists())).collect();
        if !absent.is_empty() {
            let headers: Vec<_> = absent.iter().map(|(header, _)| *header).collect();
            let packages: Vec<_> = absent.iter().map(|(_, package)| format!("'{package}'")).collect();
            return Err(format!(
                "the feature `nccl` lacks the header files {}: `pip install {}` beside torch, or name the folders that hold them in \
                 DRAFTHORSE_CUDA_INCLUDE, separated by colons",
                headers.join(", "),
                packages.join(" ")
            ));
        }
        build.define("USE_C10D_NCCL", None).includes(folders);
    }
    build
        .try_compile("drafthorse_shim")
        .map_err(|error| format!("shim/shim.cpp does not compile: {}", error.to_string().trim()))?;

    println!("cargo:rustc-link-search=native={}", lib.display());
    let cuda: &[&str] = if with_nccl { &["torch_cuda", "c10_cuda"] } else { &[] };
    for library in cuda.iter().chain(&["torch_cpu", "c10"]) {
        println!("cargo:rustc-link-lib=dylib={library}");
    }
    Ok(())
}

/// DRAFTHORSE_CUDA_INCLUDE, then where pip puts NVIDIA's headers beside torch, then the usual toolkit folder.
fn cuda_folders(torch: &Path) -> Vec<PathBuf> {
    let given = std::env::var_os("DRAFTHORSE_CUDA_INCLUDE").unwrap_or_default();
    let mut folders: Vec<PathBuf> = std::env::split_paths(&given).filter(|path| !path.as_os_str().is_empty()).collect();
    let nvidia = torch.join("../nvidia");
    folders.extend(["nccl/include", "cu13/include", "cu13/include/cccl"].map(|folder| nvidia.join(folder)));
    folders.extend(["/usr/local/cuda/include", "/usr/local/cuda/include/cccl"].map(PathBuf::from));
    folders.retain(|folder| folder.is_dir());
    folders
}

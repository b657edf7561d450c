# Every target that needs libtorch or the sample model runs set-up first; set-up takes no time when nothing is missing.

# rustup puts cargo here, and a shell that is not a login shell may not look there.
export PATH := $(PATH):$(HOME)/.cargo/bin

.DEFAULT_GOAL := help
.PHONY: help setup build quickstart test bench soak

help:                  ## list these targets
	@awk -F ' *## *' '/^[a-z]+:.*##/ { sub(/:.*/, "", $$1); printf "  make %-12s%s\n", $$1, $$2 }' Makefile

setup:                 ## fetch libtorch and the sample model, check the tools
	@python3 setup/setup.py

build: setup           ## build target/release/drafthorse
	cargo build --release

quickstart: build      ## from nothing to a scored drafter: recipes/quickstart.toml
	cargo run --release --quiet -- run recipes/quickstart.toml

# rustfmt and clippy are components that a minimal toolchain lacks; the tests themselves do not need them.
test: setup            ## formatting, lints and all tests
	python3 -B -m unittest discover --start-directory setup
	@python3 -B setup/dry_run_model.py || echo "test: without that model the rehearsal with Qwen3's vocabulary is skipped"
	@if cargo fmt --version >/dev/null 2>&1; \
	then echo "cargo fmt --all --check"; cargo fmt --all --check; \
	else echo "test: no rustfmt here, formatting is not checked (rustup component add rustfmt)"; fi
	@if cargo clippy --version >/dev/null 2>&1; \
	then echo "cargo clippy"; cargo clippy --release --workspace --all-targets -- -D warnings; \
	else echo "test: no clippy here, lints are not checked (rustup component add clippy)"; fi
	cargo test --release --workspace

# The bench profile would compile libtorch's bindings once more. The plain programs that ours are measured against need a Python with torch,
# transformers and datasets of its own, 5 GB on disk; PYTHON=… names one that is there.
PYTHON ?= .bench/bin/python
PLAIN := torch==2.11.0 numpy safetensors transformers datasets tokenizers
BENCH = PYTHON="$(if $(findstring /,$(PYTHON)),$(abspath $(PYTHON)),$(PYTHON))" cargo bench --profile release
bench: setup           ## each part beside plain PyTorch, transformers and datasets
	@[ "$(PYTHON)" != .bench/bin/python ] || { [ -x .bench/bin/python ] && [ "$$(cat .bench/packages)" = "$(PLAIN)" ]; } || \
	{ rm -rf .bench .bench.partial && python3 -m venv .bench.partial && .bench.partial/bin/pip install --quiet $(PLAIN) && \
	echo "$(PLAIN)" > .bench.partial/packages && mv .bench.partial .bench; }
	$(BENCH) -p drafthorse-model --bench forward
	$(BENCH) -p drafthorse-pruner --bench search
	$(BENCH) -p drafthorse-data --bench prepare
	$(BENCH) -p drafthorse-evaluator --bench generate
	$(BENCH) -p drafthorse-trainer --bench step

soak: setup            ## fault campaigns, lossless decoding of 140 real prompts, every interleaving of the decoder's threads: hours
	cargo test --release --manifest-path tests/loom/Cargo.toml --target-dir target/loom -- --nocapture
	cargo test --release --workspace --test end_to_end -- --ignored --nocapture --test-threads 1
	cargo test --release --workspace --test decoders -- --ignored --nocapture
	cargo test --release --workspace --test real_prompts -- --ignored --nocapture --test-threads 1
	cargo test --release --workspace --test generate -- --ignored --nocapture
	cargo test --release --workspace --test scale -- --ignored --nocapture

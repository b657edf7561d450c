//! Link flags shared by every package that makes a binary or a test over libtorch (each names this file as its build script, or, as
//! torch/ does, calls it from its own).
//!
//! The rpath lets plain `cargo run` and `cargo test` find libtorch with no environment variable set.
//! `--no-as-needed -ltorch` keeps libtorch's CUDA half registered: without it `Cuda::is_available()` is silently false
//! (https://github.com/LaurentMazare/tch-rs/issues/907).

pub(crate) fn main() {
    println!("cargo:rerun-if-env-changed=DEP_TCH_LIBTORCH_LIB");
    if let Ok(lib) = std::env::var("DEP_TCH_LIBTORCH_LIB") {
        println!("cargo:rustc-link-arg=-Wl,-rpath,{lib}");
        println!("cargo:rustc-link-arg=-Wl,--no-as-needed");
        println!("cargo:rustc-link-arg=-L{lib}");
        println!("cargo:rustc-link-arg=-ltorch");
    }
}

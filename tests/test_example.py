"""The example is what a user copies, so it runs as a user runs it."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_the_layer_decodes_like_one_fp64_layer_on_every_shard_count():
    command = [sys.executable, str(ROOT / "examples" / "kda_layer.py")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert [line.split(",")[1].strip() for line in lines[:-1]] == ["1 ranks", "2 ranks", "4 ranks"] * 2
    assert "FAILED" not in done.stdout
    assert lines[-1] == "Shards, staged weights and the paged pool give what one fp64 layer gives."

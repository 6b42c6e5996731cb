"""The path of a ROCm user, as far as it goes without a GPU: torch's own extension build, loaded, called, refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kdagen import isa
from kdagen.paths import generated_dir
from kdagen.target import CDNA
from kdagen.variants import of_target
from tests.rocm import ARCHS, make_rocm, run_python

CDNA_VARIANTS = of_target(CDNA)

LOAD = """
import ctypes, json, time, kdagen
from kdagen import op, build
from kdagen.abi import KdaDecodeParams
started = time.monotonic()
kdagen.load()
seconds = time.monotonic() - started
errors = []
for heads in {heads}:
    try:
        op.launch(heads, KdaDecodeParams(rows=1))
    except RuntimeError as error:
        errors.append(str(error))
print(json.dumps({{"library": op._library._name, "seconds": seconds, "errors": errors}}))
"""


@pytest.fixture(scope="module")
def rocm(tmp_path_factory):
    return make_rocm(tmp_path_factory.mktemp("rocm") / "opt")


@pytest.fixture(scope="module")
def built(rocm):
    """The op with every kernel of the table for both archs, built once."""
    script = LOAD.format(heads=[v.spec.num_heads for v in CDNA_VARIANTS])
    done = run_python(script, {**rocm, "PYTORCH_ROCM_ARCH": ";".join(ARCHS)})
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_every_variant_compiles_links_and_loads(built):
    assert Path(built["library"]).is_file()


def test_fr_62_the_library_holds_exactly_the_archs_asked_for(built):
    assert isa.offload_archs(Path(built["library"])) == ARCHS


def test_a_launch_without_a_gpu_is_a_clear_error_for_every_head_count(built):
    assert len(built["errors"]) == len(CDNA_VARIANTS)
    for variant, error in zip(CDNA_VARIANTS, built["errors"], strict=True):
        assert error.startswith(f"expected the kernel for {variant.spec.num_heads} heads to launch, got hipError")
        assert "(status 10" in error


def test_a_second_process_takes_it_from_the_cache(built, rocm):
    done = run_python(LOAD.format(heads=[]), {**rocm, "PYTORCH_ROCM_ARCH": "gfx942 gfx950"})
    again = json.loads(done.stdout)
    assert again["library"] == built["library"]
    assert "compiling" not in done.stderr
    print(f"built in {built['seconds']:.1f} s, loaded again in {again['seconds']:.3f} s")


def test_fr_69_torch_compiles_the_generated_sources_as_they_are(built):
    folder = Path(built["library"]).parent
    assert "cuda" in str(folder)
    for variant in CDNA_VARIANTS:
        assert (folder / variant.file_name).read_bytes() == (generated_dir() / variant.file_name).read_bytes()
    assert not list(folder.glob("*_hip.*"))


def test_fr_62_one_arch_alone_and_fr_69_a_new_constant_is_what_runs(rocm):
    """One kernel, built on demand: for gfx942 alone, then with a changed template."""
    script = """
import json, shutil, sys
from pathlib import Path
from kdagen import build, render
from kdagen.paths import templates_dir
from kdagen.target import CDNA
from kdagen.variants import variants_of
(variant,) = variants_of(1021)
archs = build.resolve_archs(CDNA)
first = build.build(build.Request({variant.file_name: render.render(variant)}, CDNA, archs))
folder = Path(sys.argv[1] if len(sys.argv) > 1 else first.parent.parent / "templates")
shutil.copytree(templates_dir(), folder)
stage = folder / "stages" / "delta_rule.j2"
stage.write_text(stage.read_text().replace("kL2NormEps = 1e-6f", "kL2NormEps = 2e-6f"))
second = build.build(build.Request({variant.file_name: render.render(variant, folder)}, CDNA, archs))
print(json.dumps([str(first), str(second)]))
"""
    done = run_python(script, {**rocm, "PYTORCH_ROCM_ARCH": "gfx942"})
    assert done.returncode == 0, done.stderr
    first, second = map(Path, json.loads(done.stdout))
    assert isa.offload_archs(first) == ("gfx942",)
    assert first != second
    # 1e-6f and 2e-6f as the little-endian literals of an instruction.
    old, new = bytes.fromhex("bd378635"), bytes.fromhex("bd370636")
    assert old in first.read_bytes() and new not in first.read_bytes()
    assert new in second.read_bytes() and old not in second.read_bytes()


def test_a_head_count_on_demand_joins_the_registry(built, rocm):
    script = """
import kdagen
from kdagen import op
from kdagen.abi import KdaDecodeParams
shape = kdagen.LayerShape(1021)
print(kdagen.why_unsupported(shape, "gfx942"))
kdagen.load(heads=[1021])
print(kdagen.why_unsupported(shape, "gfx942"), kdagen.find(shape, "gfx950").name)
try:
    op.launch(1021, KdaDecodeParams(rows=1))
except RuntimeError as error:
    print(error)
try:
    op.launch(1022, KdaDecodeParams(rows=1))
except RuntimeError as error:
    print(error)
"""
    done = run_python(script, {**rocm, "PYTORCH_ROCM_ARCH": ";".join(ARCHS)})
    assert done.returncode == 0, done.stderr
    before, after, launch, unknown = done.stdout.splitlines()
    assert before.startswith("num_heads: expected one of ")
    assert after == "None kda_decode_h1021_cdna"
    assert launch.startswith("expected the kernel for 1021 heads to launch, got hipError")
    assert "got 1022 heads; `kdagen.load(heads=[1022])` builds one" in unknown


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({}, "arch: expected --arch, PYTORCH_ROCM_ARCH or a visible GPU to name an architecture, got none;"),
        ({"PYTORCH_ROCM_ARCH": "gfx1100"}, "arch: expected some of gfx90a, gfx942, gfx950, got 'gfx1100'"),
        ({"PYTORCH_ROCM_ARCH": "gfx942", "ROCM_HOME": "/nowhere"}, "expected hipcc at /nowhere/bin/hipcc, found none;"),
    ],
)
def test_fr_62_what_is_missing_is_named_before_anything_starts(rocm, tmp_path, change, message):
    environment = {**rocm, "KDAGEN_CACHE_DIR": str(tmp_path), **change}
    done = run_python("from kdagen.cli import main; raise SystemExit(main(['build']))", environment)
    assert done.returncode == 1
    assert done.stderr.startswith(f"kdagen: {message}") and done.stderr.count("\n") == 1
    assert not list(tmp_path.rglob("*.o"))


def test_a_compile_failure_is_one_error_with_command_line_and_log(rocm):
    script = """
from kdagen import build
from kdagen.target import CDNA
try:
    build.build(build.Request({"broken.hip": "int f() { return undeclared; }\\n"}, CDNA, ("gfx942",)))
except Exception as error:
    print(type(error).__name__, error)
"""
    done = run_python(script, {**rocm, "PYTORCH_ROCM_ARCH": "gfx942"})
    assert done.stdout.startswith("BuildError expected ") and "hipcc" in done.stdout
    assert "broken.hip:1:18: error: use of undeclared identifier 'undeclared' (all of it in " in done.stdout
    log = Path(done.stdout.rsplit("in ", 1)[1].rstrip(")\n"))
    assert "undeclared" in log.read_text()

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from kdagen.errors import TemplateError
from kdagen.paths import templates_dir
from kdagen.render import render
from kdagen.variants import VARIANTS
from tests.harness import cdna_variant

H12 = cdna_variant(12)


@pytest.fixture
def templates(tmp_path: Path) -> Path:
    return Path(shutil.copytree(templates_dir(), tmp_path / "templates"))


def append(templates: Path, name: str, text: str) -> int:
    """Append one line; returns its number."""
    path = templates / name
    path.write_text(path.read_text() + text + "\n")
    return len(path.read_text().splitlines())


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda v: v.name)
def test_a_file_says_what_it_is_and_where_from(variant):
    text = render(variant)
    head = text.split("#include", 1)[0]
    for said in (
        "do not edit",
        variant.name,
        variant.reason,
        "stages/conv1d.j2",
        "sha256",
        f"{variant.plan.lds_bytes} B LDS",
    ):
        assert said in head
    assert f"constexpr int kHeads = {variant.spec.num_heads};" in text
    assert text.endswith("}\n")
    assert text.isascii()
    assert "\t" not in text and "\r" not in text
    assert max(map(len, text.splitlines())) <= 120


def test_reductions_print_their_plan():
    assert "a += dpp<0x141, 0xf, 0xf>(a);     // row_half_mirror: xor 4, once every quad holds one value" in render(H12)


def test_an_undefined_name_is_reported_with_template_line_and_variant(templates):
    line = append(templates, "stages/conv1d.j2", "{{ plan.no_such_number }}")
    with pytest.raises(TemplateError) as raised:
        render(H12, templates)
    assert str(raised.value) == (
        f"stages/conv1d.j2:{line}: 'kdagen.plan.Plan object' has no attribute 'no_such_number' "
        "(variant kda_decode_h12_cdna)"
    )
    assert raised.value.__cause__ is not None


def test_a_syntax_error_is_reported_with_template_line_and_variant(templates):
    line = append(templates, "targets/cdna.hip.j2", "{% nonsense %}")
    with pytest.raises(
        TemplateError, match=rf"^targets/cdna.hip.j2:{line}: .*nonsense.* \(variant kda_decode_h12_cdna\)$"
    ):
        render(H12, templates)


def test_a_missing_template_is_named(templates):
    (templates / "stages/gated_norm.j2").unlink()
    with pytest.raises(TemplateError, match=r"expected a template 'stages/gated_norm.j2', found none"):
        render(H12, templates)


@pytest.mark.parametrize("name", ["kda_decode.j2", "stages/rows.j2", "targets/cdna.hip.j2", "head.h.j2"])
def test_the_provenance_hash_covers_every_template_of_the_closure(templates, name):
    before = provenance(render(H12, templates))
    append(templates, name, "{# a comment that renders to nothing #}")
    assert provenance(render(H12, templates)) != before


def test_the_provenance_hash_ignores_templates_outside_the_closure(templates):
    before = render(H12, templates)
    (templates / "unused.j2").write_text("never included\n")
    assert render(H12, templates) == before


def provenance(text: str) -> str:
    return text.split("sha256 ", 1)[1].split()[0]


@pytest.mark.parametrize(
    "environment", [{"LC_ALL": "C"}, {"LC_ALL": "C.UTF-8", "PYTHONUTF8": "1"}, {"TZ": "Asia/Tokyo"}]
)
def test_output_is_the_same_in_every_locale_and_folder(environment, tmp_path):
    script = "import sys; from kdagen.render import render; from kdagen.variants import variants_of;"
    script += "sys.stdout.buffer.write(render(variants_of(12)[0]).encode())"
    env = {**os.environ, "PYTHONHASHSEED": "7", "PYTHONPATH": str(Path(__file__).parents[1]), **environment}
    done = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, env=env, capture_output=True, check=True)
    assert done.stdout.decode() == render(H12)

"""The one Jinja environment: a variant and its plan become text. Writes nothing."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2

from kdagen import abi
from kdagen.errors import TemplateError
from kdagen.paths import templates_dir
from kdagen.spec import INSTANCES, Instance
from kdagen.target import TARGETS
from kdagen.variants import Variant

SKELETON = "kda_decode.j2"
HEAD = "head.h.j2"


class _RecordingLoader(jinja2.BaseLoader):
    """Loads templates as UTF-8 and remembers every one it was asked for: the closure of a rendering."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.sources: dict[str, str] = {}

    def get_source(
        self, environment: jinja2.Environment, template: str
    ) -> tuple[str, str | None, Callable[[], bool] | None]:
        path = self.folder.joinpath(*jinja2.loaders.split_template_path(template))
        try:
            text = path.read_text(encoding="utf-8")
        except FileNotFoundError:
            raise jinja2.TemplateNotFound(template) from None
        self.sources[template] = text
        return text, str(path), None


def _environment(loader: _RecordingLoader) -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=loader,
        undefined=jinja2.StrictUndefined,
        autoescape=False,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        newline_sequence="\n",
    )
    environment.filters["column"] = lambda text, width: str(text).ljust(width)
    return environment


@dataclass(frozen=True)
class InstanceText:
    """An instance as the template prints it."""

    name: str
    template_arguments: str


def _instance_text(instance: Instance) -> InstanceText:
    return InstanceText(instance.name, ", ".join("true" if flag else "false" for flag in instance.flags))


def render(variant: Variant, folder: Path | None = None) -> str:
    """The generated source of one variant, ending in one newline.

    Args:
        variant: a row of the table, or one made on demand.
        folder: the templates; None for the package's own.

    Raises:
        PlanError: no plan fits.
        TemplateError: a template is missing, wrong or names something undefined.
    """
    plan = variant.plan
    loader = _RecordingLoader(folder or templates_dir())
    environment = _environment(loader)
    context: dict[str, Any] = {
        "variant": variant,
        "spec": variant.spec,
        "target": variant.target,
        "plan": plan,
        "tuning": plan.tuning,
        **_SHARED,
        "instances": [_instance_text(instance) for instance in INSTANCES],
        "tuning_lines": textwrap.wrap(str(plan.tuning), 100),
        "reason_lines": textwrap.wrap(variant.band.reason, 100),
        "query_scale": _float_literal(variant.spec.head_dim**-0.5),
    }
    what = f"variant {variant.name}"
    body = _render_one(environment, SKELETON, context, what)
    environment.get_template(HEAD)
    context["templates"] = sorted(loader.sources)
    context["provenance"] = _provenance(variant, loader.sources)
    return _render_one(environment, HEAD, context, what) + body


BINDING = ("binding.cpp", "checks.h", "cpu.h", "registry.py")
"""The generated files that make the kernels one torch op, each from templates/binding/<name>.j2."""


def render_binding(variants: Sequence[Variant], folder: Path | None = None) -> dict[str, str]:
    """The binding of a table of variants, by file name: BINDING, and <target>.inc with each target's kernels.

    Raises:
        TemplateError: as `render` does.
    """
    environment = _environment(_RecordingLoader(folder or templates_dir()))
    context: dict[str, Any] = {
        **_SHARED,
        "spec": variants[0].spec,
        "variants": variants,
        "targets": TARGETS,
        "schema_lines": re.findall(r".{1,100}(?: |$)", abi.OP_SCHEMA),
    }
    texts = {name: _render_one(environment, f"binding/{name}.j2", context, f"file {name}") for name in BINDING}
    for target in TARGETS:
        name = f"{target.name}.inc"
        texts[name] = _render_one(environment, "binding/kernels.inc.j2", {**context, "target": target}, f"file {name}")
    return texts


_SHARED: dict[str, Any] = {"params": abi.PARAMS, "struct_name": abi.STRUCT_NAME}


def _float_literal(value: float) -> str:
    return f"{value!r}f"


def _provenance(variant: Variant, sources: dict[str, str]) -> str:
    """Hash of everything the text is made from, spelled in a way that no Python version changes."""
    inputs = {
        "variant": dataclasses.asdict(variant),
        "plan": dataclasses.asdict(variant.plan),
        "params": [dataclasses.asdict(param) for param in abi.PARAMS],
        "templates": sources,
    }
    spelled = json.dumps(inputs, sort_keys=True, default=lambda enum_member: enum_member.value)
    return hashlib.sha256(spelled.encode("utf-8")).hexdigest()


def _render_one(environment: jinja2.Environment, name: str, context: dict[str, Any], what: str) -> str:
    try:
        return environment.get_template(name).render(context)
    except jinja2.TemplateSyntaxError as error:
        raise TemplateError(f"{error.name}:{error.lineno}: {error.message} ({what})") from error
    except jinja2.TemplateNotFound as error:
        raise TemplateError(f"expected a template {error.name!r}, found none ({what})") from error
    except jinja2.TemplateError as error:
        raise TemplateError(f"{_innermost(error, environment)}: {error.message} ({what})") from error


def _innermost(error: BaseException, environment: jinja2.Environment) -> str:
    """`template:line` of the deepest template frame in the traceback."""
    assert isinstance(environment.loader, _RecordingLoader)
    folder = environment.loader.folder
    where, trace = "unknown template", error.__traceback__
    while trace is not None:
        path = Path(trace.tb_frame.f_code.co_filename)
        if path.suffix == ".j2" and path.is_relative_to(folder):
            where = f"{path.relative_to(folder).as_posix()}:{trace.tb_lineno}"
        trace = trace.tb_next
    return where

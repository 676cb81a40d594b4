"""From plans to a folder: index.js and what it loads, types, a page, a report.

    index.js          the run time, the back ends and the model's description as data: one module
    index.d.ts        its types, with the model's names, shapes and element types
    model-*.wasm      code for WebAssembly, one file for each set of instructions
    weights-*.bin     constants, in shards
    test.json         the test vector
    thread.js         one more thread on WebAssembly
    worker.js, remote.js   the model in a worker, and the page's side of it
    index.html, demo.js, demo.css, settings.js   a page to try it
    package.json, report.json
"""

from __future__ import annotations

import gzip
import json
import math
import os
import re
import shutil
from base64 import b64encode
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from hashlib import sha256
from importlib.resources import files as resources
from typing import TYPE_CHECKING, Any

from tinyedge.dtype import DTYPES
from tinyedge.errors import InputError, PlanError, TinyedgeError
from tinyedge.plan import (
    CONSTANTS,
    FIRST_EXTERNAL,
    STATES,
    Copy,
    If,
    Launch,
    Plan,
    Port,
    Ref,
    Step,
    evaluate,
    flat,
    show_shape,
)

from . import script, types, vector, weights
from .weights import KINDS, Stored

if TYPE_CHECKING:
    from onnx import ModelProto

    from tinyedge.graph import Graph

    Progress = Callable[[str, int, int], None]

TARGETS = {"wasm": ("wasm",), "webgpu": ("webgpu",), "web": ("webgpu", "wasm"), "c": ("c",)}
"""Target of an export -> families of the plans in it, best first."""

CHUNK = 4 << 20
"""Bytes that are hashed together: what the run time holds before it has checked them."""

SHARD = 6 * CHUNK
"""Bytes of a weights file at most: several hosts take no file of 25 MiB or more."""

THREADS = 16
"""Most threads that the run time starts, less where the plan has fewer stacks."""

REPORT = "report.json"
LAUNCH, COPY, IF, LOOP = range(4)

NARROWED = 0.25
"""Tolerance of the self test where no driver here could run the narrowed weights: a wrong kernel
is off by more."""


@dataclass
class Part:
    """What a visitor's or developer's bytes are for. compressed: by gzip at its usual level; None
    where nobody downloads them."""

    name: str
    raw: int
    compressed: int | None


@dataclass
class Report:
    """What an export wrote. folder: where. parts: bytes by what they are for. notes: sentences
    about what a user should know. facts: the content of report.json."""

    folder: str
    parts: list[Part] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)


def export(
    model: str | os.PathLike[str] | bytes | ModelProto | Graph | Plan,
    target: str = "web",
    out: str | os.PathLike[str] = "",
    *,
    weights: str = "float32",
    labels: str | os.PathLike[str] | Mapping[str, Any] | Sequence[str] | None = None,
    dims: Mapping[str, int | tuple[int, int]] | None = None,
    shapes: Mapping[str, Sequence[int]] | None = None,
    states: Mapping[str, str] | None = None,
    progress: Progress | None = None, cache: bool = True, float16: bool = False,
) -> Report:
    """Writes a model as a bundle for web pages into the folder `out`, whole or not at all.

    model: whatever `tinyedge.compile` takes, or a plan for the target, or a plan file's path.
    target: webgpu, wasm, or web for both; c writes C11 source and a header instead (see
    `tinyedge.csource`), where neither weights nor labels can be chosen. weights: how they are
    stored: float32, float16 or int8 (with a scale for each channel); they are expanded to float32
    when they are loaded. labels: the demo page's names of classes (see `settings`). The others are
    `tinyedge.compile`'s. InputError for a folder that an export did not write and other wrong
    arguments; what `compile` raises.
    """
    if target not in TARGETS:
        raise InputError(f"target {target} is not one of {', '.join(TARGETS)}")
    if weights not in KINDS:
        raise InputError(f"weights {weights} are not one of {', '.join(KINDS)}")
    folder = check_folder(os.fspath(out))
    chosen = read_labels(labels)
    if target == "c" and (weights != "float32" or chosen):
        raise InputError(f"--{'labels' if chosen else 'weights'} is for web pages; leave it out"
                         f"{'' if chosen else ', or compile with --float16'}")
    options: dict[str, Any] = {"dims": dims, "shapes": shapes, "states": states,
                               "progress": progress, "cache": cache}
    families, source = _plans(model, target, {**options, "float16": float16})
    first = next(iter(families.values()))[0]
    if target == "c":
        return _source(first, folder)
    bundle = _Bundle(first, weights, chosen)
    expected = reference = None
    if source is not None:
        from tinyedge.compiler import compile

        reference = vector.outputs(compile(source, "cpu", **options))
    for family, plans in families.items():
        bundle.add(family, plans)
    expected = bundle.expected(reference)
    bundle.finish(expected)
    _write_folder(folder, bundle.files)
    bundle.report.folder = folder
    return bundle.report


def _plans(model: Any, target: str, options: dict[str, Any]
           ) -> tuple[dict[str, list[Plan]], Any]:
    """(family -> its plans, best first; the model, or None where it was a plan)."""
    from tinyedge import planfile
    from tinyedge.compiler import compile

    plan = model if isinstance(model, Plan) else None
    if plan is None and isinstance(model, str | os.PathLike):
        with open(model, "rb") as file:
            if file.read(len(planfile.MAGIC)) == planfile.MAGIC:
                plan = planfile.read(model)
    families = TARGETS[target]
    if plan is None:
        out = {}
        for family in families:
            made = compile(model, family, **options)
            out[family] = [replace(made, variants=()), *made.variants]
        return out, model
    there = [replace(plan, variants=()), *plan.variants]
    found = {f: [p for p in there if p.target.partition(":")[0] == f] for f in families}
    for family, plans in found.items():
        if not plans:
            raise PlanError(f"the plan is for {' and '.join(p.target for p in there)}, and -t "
                            f"{target} needs one for {family}; export from the ONNX model")
    return found, None


def _source(plan: Plan, folder: str) -> Report:
    """Writes a plan for c."""
    from tinyedge.csource import identifier, sources

    name = identifier(plan.name)
    source, header = sources(plan, name)
    files = {f"{name}.c": source.encode(), f"{name}.h": header.encode()}
    constants, scratch, states = plan.arenas
    report = Report(folder, [
        *(Part(file, len(data), None) for file, data in files.items()),
        *(Part(what, size, None) for what, size in (
            ("constants", constants), ("intermediate values", scratch), ("states", states)))])
    report.facts = _facts(plan, ["c"], {"kind": "float32"}, report, files)
    files[REPORT] = _text(report.facts)
    _write_folder(folder, files)
    return report


def _facts(plan: Plan, targets: list[str], kind: dict[str, Any], report: Report,
           files: Mapping[str, bytes]) -> dict[str, Any]:
    """The content of report.json."""
    from tinyedge import __version__

    return {
        "kind": "tinyedge bundle", "producer": f"tinyedge {__version__}",
        "model": plan.provenance.get("model", plan.name),
        "sha256": plan.provenance.get("sha256", ""), "targets": targets, "weights": kind,
        "parts": [{"name": p.name, "bytes": p.raw, "gzip": p.compressed} for p in report.parts],
        "notes": report.notes,
        "files": {name: {"bytes": len(data), "sha256": sha256(data).hexdigest()}
                  for name, data in sorted(files.items())},
    }


def _text(facts: Any) -> bytes:
    return (json.dumps(facts, indent=2) + "\n").encode()


# the folder

def check_folder(folder: str) -> str:
    """The path, after a look at whether a bundle may be written there; InputError."""
    if not folder:
        raise InputError("name the folder that the bundle is written to")
    folder = os.path.abspath(folder)
    parent = os.path.dirname(folder)
    if not os.path.isdir(parent):
        raise InputError(f"{folder}: the folder {parent} is not there; make it first")
    if not os.access(parent, os.W_OK):
        raise InputError(f"{folder}: the folder {parent} can't be written to")
    if os.path.lexists(folder) and (os.path.islink(folder) or not os.path.isdir(folder)):
        raise InputError(f"{folder}: this is not a folder; choose another name")
    if not os.path.isdir(folder) or not os.listdir(folder):
        return folder
    try:
        with open(os.path.join(folder, REPORT), encoding="utf-8") as file:
            known = json.load(file)
        written = {*known["files"], REPORT} if known["kind"] == "tinyedge bundle" else None
    except (OSError, ValueError, KeyError, TypeError):
        written = None
    if written is None:
        raise InputError(f"{folder}: the folder is not empty, and no export wrote it; choose "
                         "another one")
    there = {os.path.relpath(os.path.join(base, name), folder)
             for base, _, names in os.walk(folder) for name in names}
    if extra := sorted(there - written):
        raise InputError(f"{folder}: {extra[0]} there is not the exporter's; move it or choose "
                         "another folder")
    return folder


def _write_folder(folder: str, files: Mapping[str, bytes]) -> None:
    """Puts a folder with these files in place of what is there, or leaves things as they were."""
    mark = f".tinyedge-{os.urandom(8).hex()}"
    parent = os.path.dirname(folder)
    made, old = os.path.join(parent, mark), os.path.join(parent, f"{mark}-old")
    try:
        os.mkdir(made)
        for name, data in files.items():
            with open(os.path.join(made, name), "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
        check_folder(folder)
        if os.path.isdir(folder):
            os.rename(folder, old)
        try:
            os.rename(made, folder)
        except BaseException:
            if os.path.isdir(old):
                os.rename(old, folder)
            raise
    except OSError as error:
        raise PlanError(f"{folder}: can't be written: {error.strerror or error}") from None
    finally:
        shutil.rmtree(made, ignore_errors=True)
        shutil.rmtree(old, ignore_errors=True)


# the page's settings

def read_labels(labels: Any) -> dict[str, Any]:
    """What --labels gives, checked; see `settings`. InputError."""
    if labels is None:
        return {}
    where = "labels"
    if isinstance(labels, str | os.PathLike):
        where = os.fspath(labels)
        try:
            with open(labels, encoding="utf-8") as file:
                labels = json.load(file)
        except OSError as error:
            raise InputError(f"{where} can't be read: {error.strerror or error}") from None
        except ValueError as error:
            raise InputError(f"{where} is not JSON: {error}") from None
    if isinstance(labels, Mapping) and "labels" in labels:
        chosen = dict(labels)
    else:
        chosen = {"labels": labels}
    names = chosen["labels"]
    if isinstance(names, Mapping) and all(str(i) in names for i in range(len(names))):
        names = [names[str(i)] for i in range(len(names))]
    if not isinstance(names, Sequence) or isinstance(names, str) or not all(
            isinstance(n, str) for n in names):
        raise InputError(f"{where}: the names of classes are a list of texts, or an object with "
                         'the texts by number: {"0": ...}')
    chosen["labels"] = list(names)
    for key in chosen.keys() - {"labels", "mean", "std", "crop"}:
        raise InputError(f"{where}: there is no setting {key}; there are labels, mean, std, crop")
    for key in ("mean", "std"):
        if key in chosen:
            value = chosen[key]
            value = [value] * 3 if isinstance(value, int | float) else value
            if not isinstance(value, Sequence) or len(value) not in (1, 3) or not all(
                    isinstance(v, int | float) and (key == "mean" or v) for v in value):
                raise InputError(f"{where}: {key} is a number, or one for each channel")
            chosen[key] = list(value)
    crop = chosen.get("crop", 1)
    if not isinstance(crop, int | float) or not 0 < crop <= 1:
        raise InputError(f"{where}: crop is the share of the picture's side that is kept, from 0 "
                         "to 1")
    return chosen


def settings(plan: Plan, chosen: Mapping[str, Any]) -> dict[str, Any]:
    """What the demo page needs to know; with "picture" where the model classifies pictures.

    chosen: labels: names of classes; mean, std: what is subtracted from a channel's values 0..255,
    and what the difference is divided by then (default 0 and 255); crop: the share of the
    picture's shorter side that is kept.
    """
    symbols = vector.symbols_of(plan)
    out: dict[str, Any] = {
        "name": plan.name or "model", "labels": chosen.get("labels", []),
        "inputs": [{"name": p.name, "dtype": p.dtype, "shape": show_shape(p.shape),
                    "sizes": [evaluate(d, symbols) for d in p.shape]} for p in plan.inputs]}
    if len(plan.inputs) != 1 or plan.symbols or not plan.outputs:
        return out
    (image,), scores = plan.inputs, plan.outputs[0]
    shape = image.shape
    first = len(shape) == 4 and shape[0] == 1 and shape[1] in (1, 3)
    last = len(shape) == 4 and shape[0] == 1 and shape[3] in (1, 3) and not first
    if not (first or last) or image.dtype not in ("float32", "uint8") or \
            scores.dtype not in ("float32", "float16"):
        return out
    sizes = [int(d) for d in scores.shape if isinstance(d, int) and d != 1]
    if len(sizes) != 1 or chosen.get("labels") and len(chosen["labels"]) != sizes[0]:
        return out
    channels, height, width = (shape[1], *shape[2:]) if first else (shape[3], *shape[1:3])
    if not isinstance(height, int) or not isinstance(width, int) or min(height, width) < 16:
        return out
    plain = image.dtype == "uint8"
    out["picture"] = {
        "input": image.name, "output": scores.name, "first": first, "channels": channels,
        "height": height, "width": width, "crop": chosen.get("crop", 1),
        "mean": chosen.get("mean", [0]), "std": chosen.get("std", [1 if plain else 255]),
    }
    return out


# the bundle

def resource(name: str) -> str:
    """A file that is copied in."""
    return resources("tinyedge.web").joinpath(*name.split("/")).read_text(encoding="utf-8")


def compressed(data: bytes) -> int:
    """Bytes after gzip, as servers do it."""
    return len(gzip.compress(data, 6, mtime=0))


class _Bundle:
    """A bundle under construction: file names and contents."""

    def __init__(self, plan: Plan, kind: str, chosen: dict[str, Any]) -> None:
        self.plan, self.kind, self.chosen = plan, kind, chosen
        self.files: dict[str, bytes] = {}
        self.listed: list[str] = []
        self.plans: dict[str, list[dict[str, Any]]] = {}
        self.sources: list[tuple[Plan, Stored]] = []
        self.numbers: dict[bytes, list[int]] = {}
        self.report = Report("")
        self.error: float | None = None

    def file(self, name: str, data: bytes) -> int:
        """Adds a file that the run time downloads; its number."""
        self.files[name] = data
        self.listed.append(name)
        return len(self.listed) - 1

    def add(self, family: str, plans: list[Plan]) -> None:
        """Adds the plans of a family, best first."""
        described = self.plans.setdefault(family, [])
        for plan in plans:
            if self.kind != "float32" and "weights" not in plan.provenance:
                raise PlanError(f"the plan does not say which of its constants are weights, so "
                                f"they can't be stored as {self.kind}; export from the ONNX model")
            stored = weights.store(plan, self.kind)
            self.sources.append((plan, stored))
            one = wasm(plan) if family == "wasm" else webgpu(plan)
            if family == "wasm":
                suffix = plan.target.partition(":")[2].replace(",", "-")
                files = [self.file(f"model-{suffix or 'simd128'}.wasm", bytes(plan.code))]
            else:
                files = []
            if stored.filters:
                one |= {"filters": stored.filters, "matrices": [
                    [*m.shape, [float(str(x)) for x in m.reshape(-1)]] for m in stored.matrices]}
            one |= {"target": plan.target, "sections": stored.sections,
                    "files": files + self.shards(stored.data)}
            described.append(one)

    def shards(self, data: bytes) -> list[int]:
        """Files of weights; equal weights of several plans are stored once."""
        key = sha256(data).digest()
        if key not in self.numbers:
            taken = sum(name.startswith("weights") for name in self.listed)
            self.numbers[key] = [
                self.file(f"weights-{taken + i}.bin", data[at:at + SHARD])
                for i, at in enumerate(range(0, len(data), SHARD))]
        return self.numbers[key]

    def expected(self, reference: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
        """Outputs that the self test compares with: the reference's; where weights are narrowed,
        those of the narrowed plan, run here if there is a driver for it."""
        tolerances = [vector.TOLERANCES["float16" if "f16" in p.target else "float32"]
                      for p, _ in self.sources]
        expected = reference
        if self.kind != "float32" or reference is None:
            plan, stored = self.sources[-1]
            try:
                expected = vector.outputs(weights.rounded(plan, stored))
            except (TinyedgeError, ImportError) as error:
                self.note(f"the self test {'is left out' if reference is None else 'is lenient'}, "
                          f"as the plan can't be run here ({error})")
                tolerances = [max(t, NARROWED) for t in tolerances]
            if reference is not None and expected is not None:
                self.error = vector.difference(expected, reference)
        described = [one for plans in self.plans.values() for one in plans]
        for one, tolerance in zip(described, tolerances):
            one["tolerance"] = tolerance
        return expected

    def note(self, sentence: str) -> None:
        self.report.notes.append(sentence)

    def finish(self, expected: Mapping[str, Any] | None) -> None:
        """Adds everything that is written when all plans are known."""
        plan = self.plan
        test = None
        if expected is not None:
            data = _json(vector.to_json(plan, expected)).encode()
            test = self.file("test.json", data)
        index, parts = self.index(test)
        self.files["index.js"] = index.encode()
        self.files["index.d.ts"] = types.declarations(plan, self.plans).encode()
        self.files["remote.d.ts"] = types.REMOTE.encode()
        copied = ["worker.js", "remote.js"] + ["thread.js"] * ("wasm" in self.plans)
        for name in copied:
            self.files[name] = (_banner() + script.strip(resource(f"runtime/{name}"))).encode()
        page = settings(plan, self.chosen)
        self.files["index.html"] = resource("demo/index.html").encode()
        self.files["demo.css"] = resource("demo/demo.css").encode()
        self.files["demo.js"] = resource("demo/demo.js").encode()
        self.files["settings.js"] = f"export const settings = {_json(page)};\n".encode()
        self.files["package.json"] = _package(plan, copied)
        self.measure(parts)
        facts = self.facts()
        self.files[REPORT] = _text(facts)
        self.report.facts = facts

    def index(self, test: int | None) -> tuple[str, list[tuple[str, str]]]:
        """(index.js, its parts)."""
        plan = self.plan
        loader = _banner() + script.joined([resource("runtime/loader.js")])
        backends = {f: script.joined([resource(f"runtime/{f}.js")]) for f in self.plans}
        description = {
            "name": plan.name or "model", "chunk": CHUNK,
            "inputs": [_port(p) for p in plan.inputs],
            "outputs": [_port(p) for p in plan.outputs],
            "states": [{"name": s.name, "shape": s.shape, "dtype": s.dtype} for s in plan.states],
            "symbols": _symbols(plan), "metadata": plan.metadata, "plans": self.plans,
        }
        files = ",\n".join(self.listing(name) for name in self.listed)
        tail = (f"const model = {_json(description)};\nmodel.files = [\n{files}];\n"
                + (f"model.test = model.files[{test}];\n" if test is not None else "")
                + f"export const load = options => loadModel(model, {{{', '.join(self.plans)}}}, "
                "options);\nexport {TinyedgeError};\n")
        names = {"webgpu": "WebGPU back end", "wasm": "WebAssembly back end"}
        parts = [("loader", loader), *((names[f], text) for f, text in backends.items()),
                 ("kernels and description", tail)]
        return "".join(text for _, text in parts), parts

    def listing(self, name: str) -> str:
        """A file's entry. The form of the URL is the one that bundlers look for."""
        data = self.files[name]
        hashes = [b64encode(sha256(data[at:at + CHUNK]).digest()).decode()
                  for at in range(0, max(len(data), 1), CHUNK)]
        return (f"{{name: {_json(name)}, size: {len(data)}, hashes: {_json(hashes)}, "
                f"url: new URL({_json('./' + name)}, import.meta.url).href}}")

    def measure(self, parts: list[tuple[str, str]]) -> None:
        """Fills the report's table."""
        rows = [Part(name, len(text.encode()), compressed(text.encode())) for name, text in parts]

        def row(name: str, names: Iterable[str]) -> None:
            data = [self.files[n] for n in names]
            if data:
                rows.append(Part(name, sum(map(len, data)), sum(map(compressed, data))))

        row("index.js", ["index.js"])
        for name in self.listed:
            if name.endswith(".wasm"):
                row(name, [name])
        row("thread.js, worker.js, remote.js",
            [n for n in ("thread.js", "worker.js", "remote.js") if n in self.files])
        for numbers in self.numbers.values():
            names = [self.listed[i] for i in numbers]
            row(" … ".join(dict.fromkeys([*names[:1], *names[-1:]])), names)
        row("demo page", ["index.html", "demo.js", "demo.css", "settings.js"])
        self.report.parts = rows

    def facts(self) -> dict[str, Any]:
        if self.kind != "float32":
            self.note(f"weights are stored as {self.kind} and expanded to float32 as they load")
        narrowing = {} if self.error is None else {"difference": float(f"{self.error:.3g}")}
        return _facts(self.plan, [p.target for p, _ in self.sources],
                      {"kind": self.kind, **narrowing}, self.report, self.files)


def _json(x: Any) -> str:
    """JSON that is a JavaScript expression too, in one line."""
    return json.dumps(x, ensure_ascii=False, separators=(",", ":"), allow_nan=False)


def _banner() -> str:
    from tinyedge import __version__

    return f"/* tinyedge {__version__}, MIT licence */\n"


def _port(port: Port) -> dict[str, Any]:
    return {"name": port.name, "shape": port.shape, "dtype": port.dtype}


def _symbols(plan: Plan) -> dict[str, Any]:
    """name -> [lowest, highest, input, axis, factor, offset]: how a run's shapes tell its value."""
    from tinyedge.runtime import _solvers

    return {s.symbol: [*plan.symbols[s.symbol], s.port, s.axis, s.factor, s.offset]
            for s in _solvers(plan)}


def _package(plan: Plan, copied: list[str]) -> bytes:
    name = re.sub(r"[^a-z0-9]+", "-", (plan.name or "model").lower()).strip("-") or "model"
    exports: dict[str, Any] = {".": {"types": "./index.d.ts", "default": "./index.js"}}
    for file in copied:
        exports[f"./{file}"] = {"types": "./remote.d.ts", "default": f"./{file}"} \
            if file == "remote.js" else f"./{file}"
    exports["./package.json"] = "./package.json"
    package = {
        "name": name, "version": "1.0.0", "private": True, "type": "module",
        "main": "./index.js", "types": "./index.d.ts", "exports": exports, "sideEffects": False,
    }
    return _text(package)


def wasm(plan: Plan) -> dict[str, Any]:
    """The description of a plan for WebAssembly; PlanError where it lacks an entry."""
    e = plan.entries
    try:
        stacks = (e["pages"] * 65536 - e["stacks"]) // e["stack_size"]
        return {
            "flag": e["memory_flag"], "pages": e["pages"], "constants": e["constants"],
            "states": [e["states"], plan.arenas[STATES]], "symbols": e["symbols"],
            "inputs": [e[f"input{i}"] for i in range(len(plan.inputs))],
            "outputs": [e[f"output{i}"] for i in range(len(plan.outputs))],
            "stacks": e["stacks"], "stackSize": e["stack_size"], "threads": min(stacks, THREADS),
            "warmers": e.get("warmers", 0), "scratch": e.get("scratch", e["states"]),
        }
    except KeyError as error:
        raise PlanError(f"the plan for {plan.target} has no entry {error}; compile it again with "
                        "this version") from None


def webgpu(plan: Plan) -> dict[str, Any]:
    """The description of a plan for WebGPU: its steps over numbered buffers."""
    return _Commands(plan).description()


class _Commands:
    """A plan's steps as the run time reads them: see `prepared` in runtime/webgpu.js."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.highest = {name: high for name, (_, high) in plan.symbols.items()}
        self.sizes: list[int] = []
        self.numbers: dict[int, int] = {}
        self.uniforms: list[tuple[str, ...]] = []
        self.bound: list[int] = []
        ports = [prod_bytes(p, self.highest) for p in (*plan.inputs, *plan.outputs)]
        for arena, size in enumerate((*plan.arenas, *ports)):
            if size or arena >= FIRST_EXTERNAL:
                self.numbers[arena] = len(self.sizes)
                self.sizes.append(-(-size // 4) * 4)

    def place(self, ref: Ref) -> tuple[int, int]:
        """(buffer, byte offset)"""
        return self.numbers[ref.arena], ref.offset

    def most(self, ref: Ref) -> int:
        """Bytes with all symbols at their highest; counters of loops do not size memory."""
        return evaluate(ref.size, self.highest)

    def description(self) -> dict[str, Any]:
        plan = self.plan
        steps = self.steps(plan.steps)
        outputs = [prod_bytes(p, self.highest) for p in plan.outputs]
        first = FIRST_EXTERNAL + len(plan.inputs)
        return {
            "features": ["shader-f16"] if "f16" in plan.target else [],
            "limits": self.limits(), "buffers": self.sizes,
            "constants": self.numbers.get(CONSTANTS, -1), "states": self.numbers.get(STATES, -1),
            "inputs": [self.numbers[FIRST_EXTERNAL + i] for i in range(len(plan.inputs))],
            "outputs": [self.numbers[first + i] for i in range(len(outputs))],
            "ports": list(range(self.numbers[FIRST_EXTERNAL], len(self.sizes)))
            if FIRST_EXTERNAL in self.numbers else [],
            "staging": max(8, sum(-(-n // 8) * 8 for n in outputs)),
            "uniforms": self.uniforms,
            "kernels": [{"name": k.name, "code": script.strip_wgsl(k.source), "writes": k.writes}
                        for k in plan.kernels],
            "steps": steps,
        }

    def steps(self, steps: Iterable[Step]) -> list[list[Any]]:
        out: list[list[Any]] = []
        for s in steps:
            if isinstance(s, Launch):
                out.append(self.launch(s))
            elif isinstance(s, Copy):
                out.append([COPY, *self.place(s.source), *self.place(s.target), s.source.size])
            elif isinstance(s, If):
                out.append([IF, self.place(s.cond), self.steps(s.then), self.steps(s.other)])
            else:
                out.append([LOOP, s.symbol, self.place(s.trips), self.place(s.cond),
                            self.steps(s.body)])
        return out

    def launch(self, s: Launch) -> list[Any]:
        self.bound.append(len(s.buffers))
        refs = [[*self.place(r), self.most(r)] for r in s.buffers]
        if not s.scalars:
            return [LAUNCH, s.kernel, refs, s.grid]
        if s.scalars not in self.uniforms:
            self.uniforms.append(s.scalars)
        return [LAUNCH, s.kernel, refs, s.grid, self.uniforms.index(s.scalars)]

    def limits(self) -> dict[str, int]:
        """What a device must be able to do, by the names that WebGPU gives its limits."""
        launches = [s for s in flat(self.plan.steps) if isinstance(s, Launch)]
        sizes = [k.resources for k in self.plan.kernels]
        across = [r.get("workgroup", r.get("x", 1)) for r in sizes]
        all_of = [a * r.get("y", 1) * r.get("z", 1) for a, r in zip(across, sizes)]
        return {
            "maxBufferSize": max(self.sizes, default=0),
            "maxStorageBufferBindingSize": max(
                (self.most(r) for s in launches for r in s.buffers), default=0),
            "maxStorageBuffersPerShaderStage": max(self.bound, default=0),
            "maxComputeWorkgroupSizeX": max(across, default=1),
            "maxComputeInvocationsPerWorkgroup": max(all_of, default=1),
        }


def prod_bytes(port: Port, symbols: Mapping[str, int]) -> int:
    """Bytes of a port with these symbols."""
    return math.prod(evaluate(d, symbols) for d in port.shape) * DTYPES[port.dtype].itemsize

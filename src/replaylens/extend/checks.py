"""`check`: does a part that somebody adds keep the promises of its kind? A task, model family, estimator, site or view.

Bits, gradients and contracts are tried, and in a checkout every place where the part must be named is looked at. Nothing is
proved. The command line is `replaylens extend check NAME`.
"""

import inspect
import math
import re
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import cache, partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from sklearn.base import clone
from sklearn.discriminant_analysis import LinearDiscriminantAnalysis
from sklearn.pipeline import Pipeline
from torch import Tensor

import replaylens as rl
from replaylens import tasks
from replaylens.engine.display import Citable
from replaylens.engine.engine import Engine
from replaylens.engine.errors import BadEdit, BadRequest, EngineError, NoGradient, nearest, no_such
from replaylens.engine.model.config import ModelConfig
from replaylens.engine.model.decoder import Decoder
from replaylens.engine.model.ops import SequenceOps
from replaylens.engine.model.sites import GLOBAL_SITES, KEY_SITES, layer_sites
from replaylens.engine.request.edits import Edit
from replaylens.probes.registry import ESTIMATORS, Estimator
from replaylens.tasks.conformance import BrokenPromise
from replaylens.tasks.registry import load as load_task
from replaylens.tasks.registry import module_of
from replaylens.weights import zoo
from replaylens.weights.check import as_defined, blocks_of
from replaylens.weights.families import FAMILIES
from replaylens.weights.hub import PACKAGED, fetched_folder
from replaylens.weights.loading import load

if TYPE_CHECKING:
    from torch import nn

ROOT = Path(__file__).parents[3]
TOLERANCE = 2e-5
"""relative, of float32 gradients against float64"""
LAYER_NAMES = tuple(dict.fromkeys([*layer_sites(False, False), *layer_sites(True, True)]))
Problems = Iterator[str]
Promise = tuple[str, Callable[[], Problems]]
"""what is promised, and its problems"""


def check(name: str, *, kind: str | None = None, model: "str | Path | nn.Module | None" = None) -> list[BrokenPromise]:
    """Try every promise of a part, with the first problem of each that is broken. Mutates nothing but the registries.

    name   of a task, family, estimator, site or view (the class of a result); or file.py:NAME or module:NAME, whose code runs
           and registers it
    kind   one of `KINDS`, if several have the name
    model  of a family: a folder or transformers model to try it on. Default: a tiny random one, made of its config class
    """
    if kind is not None and kind not in KINDS:
        raise BadRequest(no_such("kind", kind, KINDS))
    name, found = _find(name), names()
    kinds = [each for each, known in found.items() if name in known]
    if not kinds:
        raise BadRequest(_unknown(name, found))
    if kind is not None and kind not in kinds:
        raise BadRequest(f"{name!r} is {_a(kinds)}, not {_a([kind])}. Leave out kind={kind}, or give the name of {_a([kind])}.")
    if kind is None and len(kinds) > 1:
        raise BadRequest(f"{name!r} is {_a(kinds)}. Say which one with kind=KIND.")
    kind = kind or kinds[0]
    if model is not None and kind != "family":
        raise BadRequest(f"A model was given, but {name!r} is {_a([kind])}. Leave it out.")
    promises = KINDS[kind](name) if model is None else _family(name, _given(model))
    return [_tried(what, problems) for what, problems in (*promises, *_places(kind, name))]


def names() -> dict[str, tuple[str, ...]]:
    """What `check` takes: kind -> names."""
    known = {"task": tasks.names(), "family": FAMILIES, "estimator": ESTIMATORS, "site": (*LAYER_NAMES, *GLOBAL_SITES)}
    return {kind: tuple(found) for kind, found in (known | {"view": sorted(views())}).items()}


class _NotRun(Exception):
    """A promise cannot be tried; the message says why."""


def _not_run(why: str) -> Callable[[], Problems]:
    """In the place of the problems of a promise that is not tried."""

    def problems() -> Problems:
        raise _NotRun(why)

    return problems


def _tried(promise: str, problems: Callable[[], Problems]) -> BrokenPromise:
    try:
        return BrokenPromise(promise, next(problems(), ""))
    except _NotRun as why:
        return BrokenPromise(promise, "", str(why))
    except Exception as error:  # the part's code is what is on trial
        return BrokenPromise(promise, f"{type(error).__name__}: {error}")


def _find(name: str) -> str:
    """The name in its registry. Runs the code of a file or module that is named before a colon."""
    source, colon, attribute = name.rpartition(":")
    if name.endswith(".py"):
        raise BadRequest(f"{name} names a file and no part of it. Give {name}:NAME, with the name that its code registers.")
    if not colon:
        return name
    value = getattr(module_of(source), attribute, None)
    return load_task(name).name if isinstance(value, type) and issubclass(value, tasks.Task) else attribute


def _unknown(name: str, found: dict[str, tuple[str, ...]]) -> str:
    near = [(kind, each) for kind, known in found.items() if (each := nearest(within(name), known)) is not None]
    meant = " or ".join(f"{kind} {each!r}" for kind, each in near)
    hint = f" (did you mean the {meant}?)" if near else ""
    return (
        f"No task, family, estimator, site or view is called {name!r}{hint}. `replaylens extend check --list` lists all; give "
        "file.py:NAME to run the code that adds one."
    )


def _a(kinds: Sequence[str]) -> str:
    return " and ".join(f"{'an' if kind[0] in 'aeiou' else 'a'} {kind}" for kind in kinds)


# ---- places ----------------------------------------------------------------------------------------------------------

PLACES: dict[str, dict[str, str]] = {
    "task": {"tasks/registry.py": '"{name}"', "docs/tasks.md": "## {name}", "tests/tasks/conftest.py": '"{name}"'},
    "family": {
        "src/replaylens/weights/families/__init__.py": '"{name}"',
        "docs/models.md": "{name}",
        "tests/families.py tests/mixtures.py tests/tiny_shapes.py": "{config}",
    },
    "estimator": {"probes/registry.py": '"{name}"', "docs/probes.md": "{name}"},
    "site": {"engine/model/sites.py": '"{name}"'},
    "view": {"tests/drawings.py": "{name}"},
}
"""kind -> files of a checkout (any of those in one entry) and the words that one of them has"""


def _places(kind: str, name: str) -> list[Promise]:
    """Of a part that belongs to the package, in a checkout: where it must be named."""
    why = "" if (ROOT / "tests").is_dir() else "this is no checkout of replaylens"
    if why := why or ("" if name in _own(kind) else f"the {kind} is not part of replaylens"):
        return [("the files of a checkout name it", _not_run(why))]
    return [(f"{files} names it", partial(_said, files, said, name)) for files, said in PLACES[kind].items()]


def _said(files: str, said: str, name: str) -> Problems:
    config = _config_class(name).__name__.removesuffix("Config") if "{config}" in said else ""
    said = said.format(name=name, config=config)
    found = re.compile(rf"(?<!\w){re.escape(said)}(?![-\w])|{re.escape(config) or '$.'}Config")
    if not any(found.search((ROOT / file).read_text(encoding="utf-8")) for file in files.split()):
        yield f"{said} is missing there."


def _own(kind: str) -> set[str]:
    """The names of a kind that code of this package defines."""
    match kind:
        case "task":
            return {name for name in tasks.names() if tasks.get(name).__module__.startswith("replaylens.")}
        case "view":
            return {name for name, made in views().items() if made.__module__.startswith("replaylens.")}
        case "site":
            return {*LAYER_NAMES, *GLOBAL_SITES}
    file = {"family": "src/replaylens/weights/families/__init__.py", "estimator": "probes/registry.py"}[kind]
    text = (ROOT / file).read_text(encoding="utf-8")
    return {name for name in (FAMILIES if kind == "family" else ESTIMATORS) if f'"{name}"' in text}


# ---- tasks -----------------------------------------------------------------------------------------------------------


def _task(name: str) -> list[Promise]:
    task = tasks.get(name)()
    kept = [(each.promise, lambda each=each: iter([each.problem] if each.problem else [])) for each in tasks.check(task)]
    return [*kept, ("steps and query have rows, with the bits that they have alone", lambda: _places_of(task))]


def _places_of(task: Any) -> Problems:
    from replaylens.probes.rows import ProbeRows
    from replaylens.tasks.tokenizer import WordTokenizer

    examples, tokenizer = task.examples(6), WordTokenizer(task.vocabulary())
    longest = max(len(tokenizer.encode(example.text)) for example in examples)
    config = ModelConfig(1, 32, 2, 2, 16, 48, vocab_size=tokenizer.vocab_size, max_positions=longest + 8, rotary_dim=16)
    engine = Engine(Decoder(config).initialize(0), tokenizer=tokenizer)
    run, labels = engine.replay(examples, sites="S"), (example.reading.marks for example in examples)
    counts = [mark.labels.get(task.step_label) for marks in labels for mark in marks]
    if max((count for count in counts if isinstance(count, int)), default=0) == 0:
        yield f"The label {task.step_label!r} never grows, so that no row is at the position `step`. Set `step_label`."
    if not len(ProbeRows.of(run).at("query")):
        yield "No row is at the position `query`: no token of a prompt has labels."
    among, alone = (
        ProbeRows.of(each).at("query").matrix("S", 1)[-1] for each in (run, engine.replay(examples[-1:], sites="S"))
    )
    if not np.array_equal(among, alone):
        yield "An example has other bits among others than alone."


# ---- families --------------------------------------------------------------------------------------------------------

SIZES: dict[str, int] = dict(
    hidden_size=64, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2, head_dim=16, intermediate_size=64,
    vocab_size=97, max_position_embeddings=128, n_embd=64, n_layer=2, n_head=4, n_positions=128, n_inner=64, ffn_dim=64,
    ffn_hidden_size=64, d_model=64, n_layers=2, n_heads=4, max_seq_len=128, num_layers=2, num_heads=4, word_embed_proj_dim=64,
    rotary_dim=8, num_experts=4, num_local_experts=4, n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=24,
    shared_expert_intermediate_size=24, pad_token_id=0, bos_token_id=1, eos_token_id=2,
)  # fmt: skip
"""fields of transformers' configs -> their values in a tiny model, where a config has them"""
TOKENS = [3, 14, 15, 92, 65, 35, 89, 79, 32, 38, 46, 26, 43, 83, 27, 95, 2, 88, 41, 97 - 3]
HARMLESS = re.compile(
    r"_attn_implementation|attribute_map|dtype|get_text_config|return_dict|output_\w+|use_cache|problem_type|num_labels"
    r"|\w*attention_softmax_in_fp32|\w*dropout|\w+_pdrop|layerdrop|(embedding_)?initializer_range|pad_token_id|is_decoder|reorder_and_upcast_attn|summary_\w+"
    r"|text_config|vision_config|image_token_id|mm_tokens_per_image"  # Gemma-3's classes for pictures
    r"|depth|in_channels|num_position_embeddings|out_hidden_size|(temporal_)?patch_size|spatial_merge_size|video_token_id"
    r"|num_logits_to_keep"  # of generation
    r"|router_aux_loss_coef|(router|input)_jitter_noise"  # of training; PhiMoE's table reads the router's
    r"|pretraining_tp|slow_but_exact"  # another order of BLOOM's sums
    r"|use_sliding_window|sliding_window_pattern"  # `layer_types` says the same
    r"|original_max_position_embeddings|head_dim"  # copied into rope_parameters; checked against the heads
)
"""config fields that do not change what a model computes from its tokens"""
UNUSED = {
    "gemma3_text": {"attn_logit_softcapping"},
    "minicpm3": {"logits_scaling"},
    "mamba2": {"layer_types"},
    "qwen3_5_text": {"num_heads"},
    "qwen3_5_moe_text": {"num_heads", "intermediate_size"},
}
"""fields that transformers mentions without computing with them: never used, given by other fields, or of pictures"""


def _given(model: "str | Path | nn.Module") -> Any:
    """The transformers model that a caller names, or gives. BadRequest if there is none, before anything is tried."""
    from transformers import AutoModelForCausalLM

    if not isinstance(model, str | Path):
        return model
    if model in (*zoo.PLAIN, *zoo.THINKING):
        raise BadRequest(
            f"{model} is an embedded model, which transformers does not have to compare with. Give the folder of a "
            f"transformers model, or one of {', '.join(PACKAGED)}."
        )
    folder = fetched_folder(str(model)) if model in PACKAGED else Path(model)
    if not (folder / "config.json").is_file():
        raise BadRequest(f"{folder} is not the folder of a transformers model: it has no config.json. Give one that has.")
    try:
        return AutoModelForCausalLM.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise BadRequest(f"transformers cannot load {folder}: {str(error).splitlines()[0]} Give another folder.") from error


def _family(name: str, model: "nn.Module | None" = None) -> list[Promise]:
    @cache
    def source() -> Any:
        return tiny(name) if model is None else model

    return [
        ("a model loads and computes what transformers computes", lambda: _loads(source())),
        ("no config field is overlooked", lambda: _reads_everything(name, source())),
        ("every site has the bits of its row alone", lambda: _bits(load(source()))),
        ("drafts, forks and rollback change no bit", lambda: _rolls_back(load(source()))),
        ("gradients are those of autograd in float64", lambda: _gradients(source())),
    ]


def tiny(name: str) -> Any:
    """A random transformers model of a family, with two small layers. BadRequest if its config needs more than sizes."""
    from transformers import AutoModelForCausalLM

    made, problem = _config_class(name), ""
    for changes in ({}, {"num_key_value_heads": 4}, {"head_dim": None}):
        sizes = {key: value for key, value in (SIZES | changes).items() if value is not None and hasattr(made(), key)}
        try:
            torch.manual_seed(0)
            model = AutoModelForCausalLM.from_config(made(**sizes)).eval()
            load(model)
        except Exception as error:  # transformers' and the table's own; the last one is shown
            problem = f"{type(error).__name__}: {error}"
            continue
        with torch.no_grad():
            for parameter in model.parameters():  # biases and norms too, or a forgotten one would not show
                parameter += 0.1 * torch.randn(parameter.shape, dtype=torch.float32)
        return model
    raise BadRequest(f"No tiny model of {name!r} can be made of sizes alone ({problem}). Give one with model=FOLDER.")


def _config_class(name: str) -> Any:
    from transformers import CONFIG_MAPPING

    if name not in CONFIG_MAPPING:
        raise BadRequest(f"The installed transformers has no model_type {name!r}. Install a version that has it.")
    return CONFIG_MAPPING[name]


def _loads(source: Any) -> Problems:
    load(source, check=True)
    return iter(())


def _reads_everything(name: str, source: Any) -> Problems:
    if found := overlooked(name, [source]):
        yield f"transformers' code reads {', '.join(sorted(found))}. Read it in the table, or say in `only` which are right."


class Seen(dict[str, Any]):
    """A config that remembers which fields were read."""

    def __init__(self, raw: dict[str, Any]) -> None:
        super().__init__(raw)
        self.read: set[str] = set()

    def __getitem__(self, name: str) -> Any:
        self.read.add(name)
        return super().__getitem__(name)

    def get(self, name: str, otherwise: Any = None) -> Any:
        self.read.add(name)
        return super().get(name, otherwise)


def overlooked(family: str, models: Sequence[Any]) -> set[str]:
    """The config fields that transformers' code for the family mentions, and that its table neither reads nor refuses.

    That a field is among the neutral ones is no excuse: those are refused because transformers ignores them.
    """
    table, known, mentioned = FAMILIES[family], set(UNUSED.get(family, ())), set[str]()
    for model in models:
        raw = Seen(model.config.to_dict())
        table.config(raw)
        known |= raw.read | table.used | set(table.only) | set(table.same)
        source = inspect.getsource(sys.modules[type(model).__module__])
        found = re.findall(r"config\.(\w+)", source) + re.findall(r'getattr\((?:self\.)?config, "(\w+)"', source)
        mentioned |= {model.config.attribute_map.get(field, field) for field in found}
    return {field for field in mentioned - known if not HARMLESS.fullmatch(field)}


def _bits(model: Any, only: str | None = None) -> Problems:
    """Sites whose rows differ between a prompt and its tokens one by one; of all sites, or of those with one name."""
    if only is not None and only.endswith(KEY_SITES):
        raise _NotRun("it has one number per key, so that a row alone has another shape")
    together, single = (Engine(model, page_size=size) for size in (16, 4))
    sites = [each for each in together.sites.in_order() if not each.endswith(KEY_SITES) and only in (None, within(each))]
    whole, row = together.prompt(TOKENS, sites=sites), single.prompt(TOKENS[:1], sites=sites)
    for token in TOKENS[1:]:
        row.force([token])
    for site in sites:
        if not torch.equal(whole.activations[site], row.activations[site]):
            yield f"{site} has other bits in a prompt of {len(TOKENS)} tokens than token by token."
    if not torch.equal(whole.kv(), row.kv()):
        yield f"The KV of a prompt of {len(TOKENS)} tokens has other bits than token by token."


def _rolls_back(model: Any) -> Problems:
    engine = Engine(model)
    plain = engine.prompt(TOKENS, sites="S").generate(8)
    drafted = engine.prompt(TOKENS, sites="S").generate(8, drafter="ngram", window=4)
    forked = engine.prompt(TOKENS[:12], sites="S").fork(2)[1].force(TOKENS[12:]).generate(8)
    again = engine.prompt(TOKENS, sites="S").generate(8).rollback(to=len(TOKENS) + 3).generate(5)
    for how, branch in (("drafts", drafted), ("a fork", forked), ("a rollback", again)):
        if branch.tokens != plain.tokens or not torch.equal(branch.kv(), plain.kv()):
            yield f"After {how}, tokens or KV differ."
        for site in plain.activations:
            if not torch.equal(branch.activations[site], plain.activations[site]):
                yield f"After {how}, {site} differs."


def _metric(row: Tensor) -> Tensor:
    return row.log_softmax(-1)[5] - 0.3 * row[7]


def _gradients(source: Any) -> Problems:
    """Of the residual stream before every block, against autograd through transformers in float64."""
    engine = Engine.load(source, check=False)
    try:
        ours = engine.prompt(TOKENS).gradients(_metric, "S")
    except NoGradient as error:
        raise _NotRun(f"they are refused: {error}") from None
    kept: list[Tensor] = []

    def keep(_: Any, given: tuple[Tensor, ...]) -> None:
        kept.append(given[0])
        given[0].retain_grad()

    exact = deepcopy(source).double().requires_grad_(True)
    for block in blocks_of(exact, engine.config.num_layers):
        block.register_forward_pre_hook(keep)
    with as_defined(exact):
        _metric(exact(input_ids=torch.tensor([TOKENS]), use_cache=False).logits[0, -1]).backward()
    for layer, (site, value) in enumerate(zip(engine.sites.per_layer("S"), kept, strict=False)):
        assert value.grad is not None
        off = float((ours[site].double() - value.grad[0]).norm() / value.grad[0].norm().clamp_min(1e-30))
        if not off < TOLERANCE:
            yield f"At S{layer}, gradients are {off:.1e} off autograd's."


# ---- estimators ------------------------------------------------------------------------------------------------------


FAILED_ELSEWHERE = {
    Pipeline: ("check_estimators_overwrite_params", "check_dont_overwrite_parameters"),  # it fits its steps in place
    LinearDiscriminantAnalysis: ("check_classifiers_one_label",),
}
"""scikit-learn's checks that its own classes fail"""
PAIRS = ("ccs",)
"""estimators whose rows are pairs: their width is even, and two classes are all they take"""


def _estimator(name: str) -> list[Promise]:
    spec = ESTIMATORS[name]
    alone = _not_run("it is registered as swept='no', for calls from Python with rows of its own")
    swept = [alone, alone] if spec.swept == "no" else [lambda: _swept(spec), lambda: _swept_task(spec)]
    return [
        ("`make` gives a new estimator at each call", lambda: _makes(spec)),
        ("the same rows give the same bits, and stay as they are", lambda: _same_bits(spec)),
        ("scikit-learn's own checks pass", lambda: _scikit_learn(spec)),
        ("a sweep fits it, and it finds classes that are far apart", swept[0]),
        ("a sweep of a task runs, with its controls and known zeros", swept[1]),
        ("its direction can be read", lambda: _direction(spec)),
    ]


def _makes(spec: Estimator) -> Problems:
    first, second = spec.make(), spec.make()
    if isinstance(first, type) or not hasattr(first, "fit"):
        yield f"It gives {first!r}, which cannot be fitted. Give a class, or a function that makes an estimator."
    if first is second:
        yield "It gives the same object twice, so that fits would share it. Make a new one at each call."


def _scikit_learn(spec: Estimator) -> Problems:
    from sklearn.utils.estimator_checks import check_estimator

    made = spec.make()
    if spec.name in PAIRS:
        raise _NotRun("its rows are pairs, which these checks do not give")
    if type(made).__module__.startswith("sklearn."):
        raise _NotRun(f"{type(made).__name__} is a class of scikit-learn, which has tests of its own")
    allowed = {check for kind, checks in FAILED_ELSEWHERE.items() if isinstance(made, kind) for check in checks}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for found in check_estimator(made, on_fail=None):
            if found["status"] == "failed" and found["check_name"] not in allowed:
                yield f"{found['check_name']}: {found['exception']}"


def _rows(classes: int) -> tuple[np.ndarray, np.ndarray]:
    """Rows of classes that are far apart."""
    generator = np.random.default_rng(1)
    codes = generator.integers(classes, size=240)
    return generator.normal(size=(240, 6)) + 5 * np.eye(6)[codes], np.array(["a", "b", "c"])[codes]


def _same_bits(spec: Estimator) -> Problems:
    X, y = _rows(2)
    labels: Any = (y == "a").astype(float) if "class" not in spec.kinds else y
    kept = X.copy()
    first, second = (clone(spec.make()).fit(X, labels) for _ in range(2))
    answer = "predict" if hasattr(first, "predict") else "transform"
    differ = [] if np.array_equal(getattr(first, answer)(X), getattr(second, answer)(X)) else [answer]
    # Classes this far apart are often predicted alike by two different fits, so what was learned is compared as well.
    for learned, value in vars(first).items():
        numbers = isinstance(value, np.ndarray) and value.dtype.kind in "biufc"
        if numbers and value.tobytes() != getattr(second, learned).tobytes():
            differ.append(learned)
    if differ:
        yield f"Two fits differ in {' and '.join(f'`{what}`' for what in differ)}. Give every random choice a seed."
    if not np.array_equal(X, kept):
        yield "Fitting changes its input."


def _swept(spec: Estimator) -> Problems:
    from replaylens.probes.rows import ProbeRows
    from replaylens.probes.sweeps import sweep

    for classes in (2, 3):
        X, y = _rows(classes)
        label: Any = X[:, 0] - X[:, 1] if "class" not in spec.kinds else y
        rows = ProbeRows.of_arrays(X, {"label": label}, groups=np.arange(len(X)) // 4)
        line = sweep(rows, "label", positions="all", estimators=spec.name, permutations=0).lines[0]
        if line["accuracy"] < 0.9:
            yield f"A sweep gives {line['metric']} {line['accuracy']:.2f} for {classes} classes that are five deviations apart."


def _swept_task(spec: Estimator) -> Problems:
    from replaylens.probes.sweeps import sweep

    run = Engine.load("coin-plain").replay(tasks.get("coin")(flips=(1, 3)).examples(40), sites="S")
    label = "state" if "class" in spec.kinds else "steps"
    found = {line["label"] for line in sweep(run, label, layers=[3], estimators=spec.name).lines}
    if wanted := {label, *(["shuffled"] if "class" in spec.kinds else [])} - found:
        yield f"The report has no line for {' and '.join(sorted(wanted))}."


def _direction(spec: Estimator) -> Problems:
    from replaylens.probes.probe import coefficients

    if not spec.linear:
        raise _NotRun("it is registered as linear=False")
    X, y = _rows(2)
    weight, bias = coefficients(spec.make().fit(X, y))
    if np.mean((X @ weight[0] + bias[0] > 0) == (y == "b")) < 0.9:
        yield "Its coefficients do not separate classes that are five deviations apart, or point to the first class."


# ---- sites -----------------------------------------------------------------------------------------------------------


def _site(name: str) -> list[Promise]:
    @cache
    def model() -> Any:
        return _model_with(name)

    return [
        ("some family has it, in the declared shape", lambda: _shaped(model(), name)),
        ("it has the bits of its row alone", lambda: _bits(model(), name)),
        ("an edit there changes the logits", lambda: _edited(model(), name)),
        ("its gradient is a difference quotient in float64", lambda: _differentiated(model(), name)),
    ]


def _model_with(name: str) -> Any:
    """A tiny model of the first family that has the site."""
    for family in FAMILIES:
        try:
            model = load(tiny(family))
        except EngineError:
            continue
        if any(within(site) == name for site in Engine(model).sites.in_order()):
            return model
    raise BadRequest(f"No tiny model of a family has the site {name!r}. Does a part of the decoder tap it?")


def within(site: str) -> str:
    """The name of a site within its block."""
    return re.sub(r"^blocks\.\d+\.", "", site)


def _last(engine: Engine, name: str) -> str:
    return [site for site in engine.sites.in_order() if within(site) == name][-1]


def _editable(engine: Engine, name: str) -> str:
    """The last site of this name, if a vector can be added there."""
    site = _last(engine, name)
    if site in engine.sites.read_only:
        raise _NotRun(f"{site} is read only")
    if site.endswith(KEY_SITES):
        raise _NotRun(f"{site} is attention, which takes other edits, and which the reference only shows")
    return site


def _shaped(model: Any, name: str) -> Problems:
    engine = Engine(model)
    site = _last(engine, name)
    found = tuple(engine.prompt(TOKENS, sites=[site]).activations[site].shape)
    if name.endswith(KEY_SITES):
        found = found[:-1]
    wanted = (len(TOKENS), *engine.sites.sites[site].shape[: len(found) - 1])
    if found != wanted:
        yield f"{site} has the shape {list(found)}, and is declared as {list(wanted)}."


def _edited(model: Any, name: str) -> Problems:
    engine = Engine(model)
    site = _editable(engine, name)
    shape = engine.sites.sites[site].shape
    value = torch.arange(math.prod(shape)).view(shape) % 7.0
    try:
        edited = engine.prompt(TOKENS, edits=[Edit(site, "add", value)])
    except BadEdit as error:
        raise _NotRun(f"it is refused: {error}") from None
    if torch.equal(edited.logits(), engine.prompt(TOKENS).logits()):
        yield f"Adding a vector at {site} changes nothing."


@dataclass
class _Nudge:
    """A tap that adds a vector at one site."""

    site: str
    by: Tensor

    def wants(self, site: str) -> bool:
        return site == self.site

    def __call__(self, site: str, value: Tensor) -> Tensor:
        return value + self.by if site == self.site else value


@torch.no_grad()
def _differentiated(model: Any, name: str) -> Problems:
    engine = Engine(model)
    site = _editable(engine, name)
    try:
        gradient = engine.prompt(TOKENS).gradients(_metric, [site])[site].double()
    except NoGradient as error:
        raise _NotRun(f"it is refused: {error}") from None
    exact, step = deepcopy(model).double(), 1e-3  # smaller ones drown where an op rounds to float32

    def value(by: Tensor) -> float:
        tap, ops = _Nudge(site, by), SequenceOps([len(TOKENS)])
        rows = exact(torch.tensor(TOKENS), torch.arange(len(TOKENS)), ops, tap)
        return float(_metric(exact.logits(rows, ops, tap)[-1]))

    drawn = torch.randn(gradient.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    for way in (gradient.sign(), drawn):
        found, wanted = float((gradient * way).sum()), (value(step * way) - value(-step * way)) / (2 * step)
        if abs(found - wanted) > 1e-4 * float(gradient.norm() * way.norm()):
            yield f"Along one direction at {site} the gradient is {found:.6g}, and the difference quotient {wanted:.6g}."


# ---- views -----------------------------------------------------------------------------------------------------------


def views() -> dict[str, type[Citable]]:
    """The classes of results, by name."""
    for where in rl._WHERE.values():
        import_module(where.partition(":")[0])
    found, left = dict[str, type[Citable]](), [Citable]
    while left:
        for each in left.pop().__subclasses__():
            found[each.__name__] = each
            left.append(each)
    return found


def _view(name: str) -> list[Promise]:
    view = views()[name]
    return [
        ("a frozen dataclass, so that its digest covers every field", lambda: _frozen(view)),
        ("a table, `frame`", lambda: iter(() if hasattr(view, "frame") else ["It has no property `frame`."])),
        ("a picture, `plot`", lambda: iter(() if hasattr(view, "plot") else ["It has no method `plot`."])),
    ]


def _frozen(view: type[Citable]) -> Problems:
    if "__dataclass_fields__" not in view.__dict__ or not view.__dataclass_params__.frozen:  # type: ignore[attr-defined]
        yield "Decorate it with @dataclass(frozen=True, eq=False)."


KINDS: dict[str, Callable[[str], list[Promise]]] = {
    "task": _task,
    "family": _family,
    "estimator": _estimator,
    "site": _site,
    "view": _view,
}
"""kind of part -> its promises"""

"""Inspect and lm-eval, as they are installed, get from an engine what they get from transformers; steering and digests hold."""

import asyncio
import json
import os
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import replaylens as rl
from replaylens.engine.errors import BadEdit, BadRequest, BadTexts, MissingPackage, UnknownSite
from replaylens.engine.files import cache_folder
from replaylens.extras.bridges.options import digest_of, edits_of, engine_of, sampling_of
from replaylens.probes.errors import BadFile
from tests.engine.serving.test_watch import probe

PROMPTS = {
    "A coin's state is heads. Alice flips. What's the state? A:": "tails",
    "A coin's state is heads. Alice flips, then Bob flips. What's the state? A:": "heads",
}
WORDS = [f"w{number}" for number in range(61)]
FLIPPED = rl.Edit("S", "zero", positions=-1, layers=[3])
"""takes the answer away"""


@pytest.fixture(scope="module")
def coin() -> rl.Engine:
    return rl.Engine.load("coin-plain")


# Options


def test_edits_come_from_a_file_of_data(tmp_path: Path) -> None:
    """A pickle, a foreign file and a missing one are refused; a list and a file give the same edits."""
    good, bad = tmp_path / "edits.json", tmp_path / "edits.pt"
    good.write_text(json.dumps([FLIPPED.to_json()]))
    assert [edit.to_json() for edit in edits_of(good)] == [edit.to_json() for edit in edits_of([FLIPPED])]
    bad.write_bytes(pickle.dumps(_Trap(tmp_path / "ran")))
    (tmp_path / "deep.json").write_text("[" * 100_000)
    for given in (bad, tmp_path / "none.json", tmp_path / "deep.json", {"site": "S"}, [{"site": "S"}], 7):
        with pytest.raises(BadEdit):
            edits_of(given)
    assert not (tmp_path / "ran").exists()
    with pytest.raises(BadRequest, match="num_beams"):
        sampling_of({"num_beams": 4}, 0, ())
    every = {"temperature": 0.5, "top_k": 3, "top_p": 0.8, "min_p": 0.1, "repetition_penalty": 1.2, "presence_penalty": 0.3}
    assert sampling_of(every, 4, ["."]) == rl.Sampling(**every, seed=4, stop=(".",))
    biased = [sampling_of({"logit_bias": each}, 0, ()) for each in ({"7": 1, 8: -1}, {7: 1, 8: -1})]
    assert biased[0] == biased[1]
    with pytest.raises(BadRequest, match="Invalid token='x'"):
        sampling_of({"logit_bias": {"x": 1}}, 0, ())
    with pytest.raises(BadRequest, match="Unknown dtype="):
        engine_of("coin-plain", {"dtype": "float8"})


class _Trap:
    """Unpickled, it would write a file."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.file),)


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    import importlib
    import sys

    for module, package in (("inspect_provider", "inspect_ai"), ("lm_eval_model", "lm_eval")):
        for name in [name for name in sys.modules if name.split(".")[0] == package]:
            monkeypatch.delitem(sys.modules, name)
        monkeypatch.setitem(sys.modules, package, None)
        monkeypatch.delitem(sys.modules, f"replaylens.extras.bridges.{module}", raising=False)
        with pytest.raises(MissingPackage, match=r"replaylens\[eval\]"):
            importlib.import_module(f"replaylens.extras.bridges.{module}")


# Inspect


def asked(coin: rl.Engine, folder: Path, *, epochs: int = 1, args: dict[str, Any] | None = None, **config: Any) -> Any:
    """The log of an evaluation on two prompts."""
    pytest.importorskip("inspect_ai")
    from inspect_ai import Task, eval
    from inspect_ai.dataset import Sample
    from inspect_ai.model import get_model
    from inspect_ai.scorer import includes
    from inspect_ai.solver import generate

    import replaylens.extras.bridges.inspect_provider  # noqa: F401 (registers it also where the package is not installed)

    model = get_model("replaylens/coin-plain", engine=coin, memoize=False, **({"chat": False} | (args or {})))
    samples = [Sample(input=prompt, target=answer) for prompt, answer in PROMPTS.items()]
    task = Task(dataset=samples, solver=generate(), scorer=includes())
    config = {"max_tokens": 3, "max_connections": 8} | config
    (log,) = eval(task, model=model, epochs=epochs, display="none", log_dir=str(folder), score_display=False, **config)
    assert log.status == "success", log.error
    return log


def test_an_evaluation_has_the_engines_own_answers(coin: rl.Engine, tmp_path: Path) -> None:
    """Texts, log-probabilities and activations are those of the engine alone. Control: steering takes the answers away."""
    args = {"sites": "S", "activations": tmp_path / "rows"}
    log = asked(coin, tmp_path, args=args, logprobs=True, top_logprobs=2, prompt_logprobs=1)
    assert log.results.scores[0].metrics["accuracy"].value == 1.0
    for sample in log.samples:
        branch = coin.prompt(sample.input, sites="S", positions="response").generate(3)
        choice, made_by = sample.output.choices[0], sample.output.metadata["replaylens"]
        assert (choice.message.text, choice.stop_reason) == (branch.generated_text, "stop")
        wanted = coin.logits(branch.tokens, positions=None).double().log_softmax(-1)
        for number, each in enumerate(choice.logprobs.content, branch.root_length):
            assert each.logprob == float(wanted[number - 1, branch.tokens[number]])
            assert each.top_logprobs[0].logprob == float(wanted[number - 1].max())
        assert len(choice.prompt_logprobs.content) == branch.root_length - 1
        rows, positions = branch.activations.copied(), branch.activations.positions()
        (told,) = made_by["choices"]
        found = told["activations"]
        assert found["digest"] == digest_of(rows, positions, [branch.tokens[each] for each in positions])
        from safetensors.torch import load_file

        held = load_file(found["file"])
        assert all(torch.equal(held[name], rows[name]) for name in rows) and held["position"].tolist() == positions
        held["blocks.2.hook_in"][0, 0] += 1e-6  # the control of the digest
        assert found["digest"] != digest_of({name: held[name] for name in rows}, positions, held["token"].tolist())
        assert told["certified"] and made_by["fingerprint"] == coin.fingerprint.digest
    (tmp_path / "edits.json").write_text(json.dumps([FLIPPED.to_json()]))
    steered = asked(coin, tmp_path, args={"edits": str(tmp_path / "edits.json")})
    own = asked(coin, tmp_path, extra_body={"edits": [FLIPPED.to_json()]})
    assert [s.output.completion for s in steered.samples] == [s.output.completion for s in own.samples]
    assert steered.results.scores[0].metrics["accuracy"].value < 1.0
    assert steered.samples[0].output.metadata["replaylens"]["edits"] == own.samples[0].output.metadata["replaylens"]["edits"]


def test_sampled_epochs_differ_and_come_again(coin: rl.Engine, tmp_path: Path) -> None:
    """Each epoch draws with a seed of its own, which reproduces its answer; a second run has the same answers."""
    runs = [asked(coin, tmp_path, epochs=3, temperature=6.0, max_tokens=4, num_choices=2) for _ in range(2)]
    found = []
    for log in runs:
        answers = set()
        for sample in log.samples:
            for choice, told in zip(sample.output.choices, sample.output.metadata["replaylens"]["choices"], strict=True):
                again = coin.prompt(sample.input).generate(4, sampling=rl.Sampling(temperature=6.0, seed=told["seed"]))
                assert choice.message.text == again.generated_text
                answers.add((sample.input, told["seed"], choice.message.text))
        found.append(answers)
    assert found[0] == found[1] and len(found[0]) == 12
    assert len({text for _, _, text in found[0]}) > 2


def test_what_is_not_supported_is_refused(coin: rl.Engine, tmp_path: Path) -> None:
    inspect = pytest.importorskip("inspect_ai.model")
    from replaylens.extras.bridges.inspect_provider import ReplayAPI

    with pytest.raises(UnknownSite):
        ReplayAPI("coin-plain", engine=coin, sites="blocks.99.hook_in")
    with pytest.raises(BadRequest, match="nothing is captured"):
        ReplayAPI("coin-plain", engine=coin, activations=tmp_path)
    api = ReplayAPI("coin-plain", engine=coin)
    message = [inspect.ChatMessageUser(content="A coin's state is heads.")]
    for config, error in (
        ({"best_of": 2}, "best_of"),
        ({"extra_body": {"probes": []}}, "Unknown key of extra_body"),
        ({}, "no chat template"),
    ):
        with pytest.raises(BadRequest, match=error) as raised:
            asyncio.run(api.generate(message, [], "none", inspect.GenerateConfig(**config)))
        assert config or isinstance(raised.value, BadTexts)


# Inspect: probes and tools


def test_the_log_has_the_scores_of_probes(coin: rl.Engine, tmp_path: Path) -> None:
    """Of every token of the answer, the last one too, as a watch of the same answer has them. Probes come from files."""
    pytest.importorskip("inspect_ai")
    one, many = probe(1, width=128), probe(2, "blocks.1.hook_out", classes=3, width=128)
    files = [str(one.save(tmp_path / "one")), str(many.save(tmp_path / "many.json"))]
    log = asked(coin, tmp_path, args={"probes": files}, temperature=1.0, epochs=2)
    both = asked(coin, tmp_path, args={"probes": {"one": one, "many": many}, "sites": "S"}, temperature=1.0, epochs=2)
    watch = coin.watch({"one": one, "many": many})
    for sample, other in zip(log.samples, both.samples, strict=True):
        made_by = sample.output.metadata["replaylens"]
        (told,) = made_by["choices"]
        assert told["scores"] == other.output.metadata["replaylens"]["choices"][0]["scores"] and "activations" not in told
        branch = watch.prompt(sample.input, positions="response")
        branch.generate(3, sampling=rl.Sampling(temperature=1.0, seed=told["seed"]), final=True)
        wanted = watch.scores(branch)
        assert told["scores"]["positions"] == list(range(branch.root_length, branch.length))
        assert told["scores"]["probes"] == {name: x.tolist() for name, x in wanted.items()}
        assert made_by["probes"]["one"] == f"replaylens:sha256:{watch.records[0].digest}"
    from replaylens.extras.bridges.inspect_provider import ReplayAPI

    for wrong in ([str(tmp_path / "none")], [str(tmp_path / "one"), str(tmp_path / "one.json")], 7, {"a": 7}):
        with pytest.raises((BadRequest, BadFile)):
            ReplayAPI("coin-plain", engine=coin, probes=wrong)


CALLS = {
    'Sure.\n<tool_call>\n{"name": "add", "arguments": {"x": 1, "y": 2}}\n</tool_call>': [("add", {"x": 1, "y": 2}, False)],
    '<tool_call>[{"name": "add", "arguments": {"x": 1}}, {"name": "b"}]</tool_call>': [
        ("add", {"x": 1}, False),
        ("b", {}, False),
    ],
    '{"name": "add", "parameters": {"x": 1}}': [("add", {"x": 1}, False)],
    '<tool_call>{"name": "add", "arguments": "{\\"x\\": 3}"}</tool_call>': [("add", {"x": 3}, False)],
    '<tool_call>{"name": "add", "argum': [("unknown", {}, True)],
    "<tool_call>7</tool_call>": [("unknown", {}, True)],
    '<tool_call>{"name": "add", "arguments": [1]}</tool_call>': [("add", {}, True)],
    "<tool_call>" + "[" * 9999 + "</tool_call>": [("unknown", {}, True)],
    '{"name": "Ann", "age": 3}': [],
    "[1, 2]": [],
    "No call.": [],
}


def test_calls_are_read_from_answers() -> None:
    pytest.importorskip("inspect_ai")
    from replaylens.extras.bridges.inspect_provider import tool_calls

    for text, wanted in CALLS.items():
        rest, found = tool_calls(text, "a")
        assert [(call.function, call.arguments, call.parse_error is not None) for call in found] == wanted, text[:60]
        assert rest == ("Sure." if text.startswith("Sure") else "" if wanted else text)
        assert len({call.id for call in found}) == len(found)


TEMPLATE = (
    "{% if tools %}<tools>{{ tools | tojson }}</tools>{% endif %}{% for m in messages %}<{{ m.role }}>{{ m.content }}"
    "{% if m.tool_calls %}{% for c in m.tool_calls %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}{% endif %}"
    "</{{ m.role }}>{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)


def test_a_tool_is_offered_called_and_answered(coin: rl.Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Inspect's own loop of tools, with a template that writes them and a stand-in for what the model says. A template that
    leaves them out, a forced call and texts without a template are refused."""
    pytest.importorskip("inspect_ai")
    from inspect_ai import Task, eval
    from inspect_ai.dataset import Sample
    from inspect_ai.model import ChatMessageUser, GenerateConfig, get_model
    from inspect_ai.scorer import includes
    from inspect_ai.solver import generate, use_tools
    from inspect_ai.tool import ToolFunction, ToolInfo, tool

    from replaylens.extras.bridges.inspect_provider import ReplayAPI

    @tool
    def add():  # type: ignore[no-untyped-def]
        async def execute(x: int, y: int) -> str:
            """Add two numbers.

            Args:
                x: one
                y: the other
            """
            return str(x + y)

        return execute

    engine, seen = letters(TEMPLATE), list[str]()
    said = ['<tool_call>{"name": "add", "arguments": {"x": 20, "y": 22}}</tool_call>', "It is 42."]

    def speak(branches: Any, n: int, **options: Any) -> None:
        seen.append(branches[0].text)
        branches[0].force(engine.text.encode(said[len(seen) - 1], special=False))

    monkeypatch.setattr(engine, "generate", speak)
    task = Task(dataset=[Sample("What is 20 + 22?", target="42")], solver=[use_tools(add()), generate()], scorer=includes())
    model = get_model("replaylens/letters", engine=engine, memoize=False)
    (log,) = eval(task, model=model, display="none", log_dir=str(tmp_path), score_display=False)
    assert log.status == "success" and log.results.scores[0].metrics["accuracy"].value == 1.0, log.error
    assert '"name": "add"' in seen[0] and '"description": "Add two numbers."' in seen[0] and "<tool>" not in seen[0]
    assert "<tool_call>" in seen[1] and "<tool>42</tool><assistant>" in seen[1]
    (call,) = log.samples[0].messages[1].tool_calls
    assert (call.function, call.arguments) == ("add", {"x": 20, "y": 22})
    api, offered = ReplayAPI("letters", engine=engine), [ToolInfo(name="add", description="Add.")]
    message = [ChatMessageUser(content="Hi")]
    for subject, choice, error in (
        (api, ToolFunction(name="add"), "cannot force"),
        (api, "any", "cannot force"),
        (ReplayAPI("letters", engine=engine, chat=False), "auto", "chat template"),
        (ReplayAPI("letters", engine=letters("{{ messages[0].content }}")), "auto", "leaves out the tools"),
    ):
        with pytest.raises(BadRequest, match=error):
            asyncio.run(subject.generate(message, offered, choice, GenerateConfig()))


def letters(template: str) -> rl.Engine:
    """A small random engine whose tokens are characters, with a chat template."""
    from tokenizers import Tokenizer, decoders
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Split
    from transformers import PreTrainedTokenizerFast

    every = [chr(code) for code in range(32, 127)] + ["\n"]
    made = Tokenizer(WordLevel({each: i for i, each in enumerate(every)}, unk_token="?"))
    made.pre_tokenizer = Split("", "isolated")
    made.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=made, unk_token="?", chat_template=template)
    from tests.toy_model import random_model

    return rl.Engine(random_model(vocab_size=96, max_positions=4096), tokenizer, cache_tokens=4096)


def test_the_entry_point_names_the_provider() -> None:
    import tomllib

    root = Path(__file__).parents[2]
    (named,) = tomllib.loads((root / "pyproject.toml").read_text())["project"]["entry-points"]["inspect_ai"].items()
    assert named == ("replaylens", "replaylens.extras.bridges.inspect_provider")
    assert (root / "src" / Path(*named[1].split("."))).with_suffix(".py").exists()


# lm-eval


@pytest.fixture(scope="module")
def pair() -> Iterator[tuple[Any, Any]]:
    """A small Llama as our model and, in float64, as lm-eval's own on transformers."""
    pytest.importorskip("lm_eval")
    from lm_eval.models.huggingface import HFLM
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    from replaylens.extras.bridges.lm_eval_model import ReplayLM

    words = Tokenizer(WordLevel({word: i for i, word in enumerate([*WORDS, "<s>", "<e>", "<u>"])}, unk_token="<u>"))
    words.pre_tokenizer = WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, bos_token="<s>", eos_token="<e>", unk_token="<u>")
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    shape = LlamaConfig(vocab_size=64, max_position_embeddings=48, initializer_range=0.3, **sizes)
    model = LlamaForCausalLM(shape).eval()
    model.generation_config.eos_token_id = model.generation_config.bos_token_id = None
    ours = ReplayLM(model, tokenizer=tokenizer, batch_size=5)
    yield ours, HFLM(pretrained=model.double(), tokenizer=tokenizer, backend="causal", batch_size=3)


def requests(kind: str, *arguments: tuple[Any, ...]) -> list[Any]:
    from lm_eval.api.instance import Instance

    return [Instance(kind, {}, each, 0) for each in arguments]


def text(first: int, count: int) -> str:
    return " ".join(WORDS[(first * 7 + 11 * each) % len(WORDS)] for each in range(count))


def test_loglikelihoods_are_those_of_transformers(pair: tuple[Any, Any]) -> None:
    """Also without a context, beyond the longest path, and rolling over windows. Control: another batch has the same bits."""
    ours, theirs = pair
    asked = requests(
        "loglikelihood",
        *((text(i, 3 + i), f" {text(i + 1, 1 + i % 3)}") for i in range(9)),
        ("", "w1 w2"),
        (text(3, 60), " w5 w6"),
    )
    here, there = ours.loglikelihood(asked, disable_tqdm=True), theirs.loglikelihood(asked, disable_tqdm=True)
    assert max(abs(a - b) for (a, _), (b, _) in zip(here, there, strict=True)) < 1e-4
    assert [greedy for _, greedy in here] == [greedy for _, greedy in there]
    alone = [ours.loglikelihood([each], disable_tqdm=True)[0] for each in asked]
    assert alone == here
    rolling = requests("loglikelihood_rolling", (text(2, 5),), (text(1, 130),))
    here, there = ours.loglikelihood_rolling(rolling, True), theirs.loglikelihood_rolling(rolling, True)
    assert max(abs(a - b) for a, b in zip(here, there, strict=True)) < 1e-4


def test_generation_is_that_of_transformers(pair: tuple[Any, Any]) -> None:
    """Greedy, with stop strings and different lengths. Control: edits change it; unknown options are refused."""
    ours, theirs = pair
    first = ours.generate_until(requests("generate_until", (text(1, 4), {"max_gen_toks": 12})), True)[0]
    stop = first.split()[5]
    asked = requests(
        "generate_until",
        *((text(i, 4 + i), {"max_gen_toks": 12}) for i in range(3)),
        (text(1, 4), {"until": [stop], "max_gen_toks": 12}),
        (text(5, 60), {"until": "w3", "max_gen_toks": 7, "do_sample": False}),
    )
    here = ours.generate_until(asked, disable_tqdm=True)
    assert here == theirs.generate_until(asked, disable_tqdm=True)
    assert stop not in here[3].split() and here[3] and first.startswith(here[3])
    from replaylens.extras.bridges.lm_eval_model import ReplayLM

    steered = ReplayLM(ours.engine, edits=[rl.Edit("S", "zero", layers=[1])])
    assert steered.generate_until(asked, True) != here and steered.get_model_info()["edits"] != ours.get_model_info()["edits"]
    for wrong in ({"num_beams": 4}, {"typical_p": 0.5}, {"max_gen_toks": 48}):
        with pytest.raises(BadRequest):
            ours.generate_until(requests("generate_until", ("w1", wrong)), True)
    with pytest.raises(BadRequest, match="continuation is empty"):
        ours._loglikelihood_tokens([(None, [1, 2, 3], [])], True)
    for wrong in ("x", "-1", 0, 1.5):
        with pytest.raises(BadRequest, match="batch_size"):
            type(ours)(ours.engine, batch_size=wrong)


def local_task(lines: list[dict[str, Any]]) -> Any:
    """A task of multiple choice from these lines, without a network."""
    from datasets import Dataset
    from lm_eval.api.task import ConfigurableTask

    return ConfigurableTask(
        config={
            "task": "local",
            "custom_dataset": lambda **_: {"test": Dataset.from_list(lines)},
            "test_split": "test",
            "output_type": "multiple_choice",
            "doc_to_text": "{{question}}",
            "doc_to_choice": "{{choices}}",
            "doc_to_target": "{{label}}",
            "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
        }
    )


def evaluated(model: Any, lines: list[dict[str, Any]]) -> tuple[float, list[int]]:
    """Accuracy on a local task, and the choice of each line."""
    from lm_eval.evaluator import evaluate

    found = evaluate(lm=model, task_dict={"local": local_task(lines)}, bootstrap_iters=0, log_samples=True)
    likely = [[float(each[0][0]) for each in sample["resps"]] for sample in found["samples"]["local"]]
    return found["results"]["local"]["acc,none"], [each.index(max(each)) for each in likely]


def test_a_task_has_the_same_choices(pair: tuple[Any, Any]) -> None:
    """lm-eval's evaluation of a local task, by its registered name's class, on both."""
    from lm_eval.api.registry import get_model

    from replaylens.extras.bridges.lm_eval_model import ReplayLM

    assert get_model("replaylens") is ReplayLM
    lines = [{"question": text(i, 5), "choices": [WORDS[(i + 3 * c) % 61] for c in range(4)], "label": i % 4} for i in range(8)]
    ours, theirs = (evaluated(model, lines) for model in pair)
    assert ours == theirs and len(set(ours[1])) > 1


FACTS = [
    ("France", " Paris"),
    ("Japan", " Tokyo"),
    ("Italy", " Rome"),
    ("Egypt", " Cairo"),
    ("Spain", " Madrid"),
    ("Cuba", " Havana"),
]
small = cache_folder() / "smollm2-135m-instruct"


@pytest.mark.slow
@pytest.mark.skipif(not small.exists(), reason="SmolLM2-135M is not in the cache folder")
def test_a_real_model_has_the_same_choices() -> None:
    """SmolLM2-135M-Instruct against lm-eval's own model in float64: the same choices, log-likelihoods within 1e-4."""
    pytest.importorskip("lm_eval")
    from lm_eval.models.huggingface import HFLM
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from replaylens.extras.bridges.lm_eval_model import ReplayLM

    ours = ReplayLM("smollm2")
    model = AutoModelForCausalLM.from_pretrained(small, dtype=torch.float64)
    theirs = HFLM(pretrained=model, tokenizer=AutoTokenizer.from_pretrained(small), backend="causal", batch_size=4)
    choices = [answer for _, answer in FACTS]
    lines = [{"question": f"The capital of {c} is", "choices": choices, "label": i} for i, (c, _) in enumerate(FACTS)]
    assert (found := evaluated(ours, lines)) == evaluated(theirs, lines) and found[0] > 0.8
    asked = requests("loglikelihood", *((f"The capital of {c} is", f"{a}, a city of") for c, a in FACTS))
    pairs = zip(ours.loglikelihood(asked, True), theirs.loglikelihood(asked, True), strict=True)
    assert all(abs(a[0] - b[0]) < 1e-4 and a[1] == b[1] for a, b in pairs)
    asked = requests(
        "generate_until", *((f"The capital of {c} is", {"until": ["."], "max_gen_toks": 12}) for c, _ in FACTS[:3])
    )
    assert ours.generate_until(asked, True) == theirs.generate_until(asked, True)

"""Every site is TransformerLens's tensor of the same name. Taps see it, and may replace it."""

from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from replaylens.engine.engine import Engine
from replaylens.engine.errors import BadEdit, UnknownSite
from replaylens.engine.model import modes
from replaylens.engine.model.decoder import Decoder
from replaylens.engine.model.sites import KEY_SITES, SiteTable, by_layer, by_letter, table
from replaylens.engine.request.capture import PassTap
from replaylens.thinking.thoughts import ThinkingSites
from replaylens.weights.loading import load
from tests.engine.passes.packed import logits, sequences
from tests.families import BOTH_NAMES, LATENT_NAMES, MORE, NAMES, NEW_WIRINGS, core, hugging_face
from tests.replay.bridges import bridge

TOLERANCE = 1e-5
SEQUENCES, LENGTH = 2, 19
"""longer than the windows; of equal lengths, since the pattern of ragged sequences is not a tensor"""
families = pytest.mark.parametrize("name", core(NAMES))
WIRINGS = (*NEW_WIRINGS, LATENT_NAMES[1], BOTH_NAMES[0], "phi", "gpt-oss", "falcon-h1", "olmo-hybrid", "nemotron-h")
NOT_IN_BRIDGE = {("neox", "hook_rot_q"), ("neox", "hook_rot_k")}
"""(family, end of the site's name) that the bridge lacks; checked through the pattern instead"""


class Capture:
    """A tap that keeps what it sees, in order."""

    def __init__(self, *sites: str) -> None:
        self.sites, self.seen = sites, dict[str, Tensor]()

    def wants(self, site: str) -> bool:
        return not self.sites or site in self.sites

    def __call__(self, site: str, value: Tensor) -> Tensor:
        self.seen[site] = value
        return value


class Replace(Capture):
    """A tap that adds one to what flows through its site."""

    def __call__(self, site: str, value: Tensor) -> Tensor:
        self.seen[site] = value
        return value + 1


class Ramp(Capture):
    """A tap that adds a ramp to what flows through its site: a norm that subtracts the mean does not remove it."""

    def __call__(self, site: str, value: Tensor) -> Tensor:
        return ramped(value)


def ramped(value: Tensor) -> Tensor:
    return value + torch.linspace(-1, 1, value.shape[-1])


def tokens() -> list[Tensor]:
    return sequences((LENGTH,) * SEQUENCES)


@cache
def decoder(name: str) -> Decoder:
    return load(hugging_face(name))


@cache
def captured(name: str) -> dict[str, Tensor]:
    """All our sites, in the order of the pass."""
    tap = Capture()
    logits(decoder(name), tokens(), tap)
    return tap.seen


@cache
@torch.no_grad()
def bridged(name: str) -> Any:
    """The bridge's cache of the same tokens."""
    return bridge(name).run_with_cache(torch.stack(tokens()))[1]


def compare(name: str, site: str, known_as: str) -> float:
    """Largest difference between our `site` and the bridge's `known_as`, brought into the bridge's shape."""
    theirs: Tensor = bridged(name)[known_as]
    ours = captured(name)[site].unflatten(0, (SEQUENCES, LENGTH))
    if site.endswith((*KEY_SITES, "_norm.hook_out")):
        ours = ours.transpose(1, 2)  # theirs: [sequence, head, query, key], or [sequence, head, position, d_head]
    assert ours.numel() == theirs.numel(), f"{known_as}: {tuple(ours.shape)} against {tuple(theirs.shape)}"
    return float((ours.reshape(theirs.shape) - theirs).abs().max())


def in_bridge(name: str, site: str) -> bool:
    return (name.split("-")[0], site.rsplit(".", 1)[-1]) not in NOT_IN_BRIDGE


# Against TransformerLens


@families
def test_every_name_is_the_bridges(name: str) -> None:
    """Each site, S, T, C and all finer ones, under its own name, its legacy names and second names of its value."""
    sites, layers = table(decoder(name).config), decoder(name).config.num_layers
    aliases = [alias for site in sites.sites.values() for alias in site.aliases]
    assert len(aliases) == len(set(aliases)) > 7 * layers and len(sites.same) >= 8 * layers + 2
    assert not set(sites.same) & {*sites.sites, *sites.aliases}
    names = [*(site for site in sites.sites if in_bridge(name, site)), *aliases, *sites.same]
    wrong = {a: error for a in names if not (error := compare(name, sites.resolve(a), a)) < TOLERANCE}
    assert wrong == {}
    shifted = {a: sites.resolve(b) for a, b in zip(sites.same, [*sites.same][1:], strict=False)}
    assert any(
        captured(name)[site].shape == captured(name)[sites.resolve(a)].shape and compare(name, site, a) > 0.01
        for a, site in shifted.items()
    ), "negative control: another name has another value"


@families
def test_the_bridge_has_no_other_names(name: str) -> None:
    """What is left out is listed in docs/bridges.md with the reason."""
    left_out = ("hook_cos", "hook_sin", "rotary_emb.hook_in", "hook_hidden_states", "embed.hook_in")
    norms = tuple(f"attn.{x}_norm.hook_{part}" for x in "qk" for part in ("in", "scale", "normalized"))
    sites = table(decoder(name).config)
    unknown = {key for key in bridged(name).cache_dict if key not in sites.sites and key not in sites.names}
    assert {key for key in unknown if not key.endswith((*left_out, *norms))} == set()


@families
@torch.no_grad()
def test_an_edit_at_a_second_name_is_the_bridges_or_refused(name: str) -> None:
    """Where other parts read the same value, an edit at the second name would mean less there than here."""
    sites = table(decoder(name).config)
    for known_as in (known_as for known_as in sites.same if known_as.startswith("blocks.1.")):
        theirs = bridge(name).run_with_hooks(
            torch.stack(tokens()), fwd_hooks=[(known_as, lambda value, hook: ramped(value))], return_type="logits"
        )
        ours = torch.stack(logits(decoder(name), tokens(), Ramp(sites.resolve(known_as))))
        same = float((ours - theirs).abs().max()) < TOLERANCE
        if known_as in sites.read_only:
            with pytest.raises(BadEdit, match="can be captured but not edited"):
                sites.editable(known_as)
        else:
            assert sites.editable(known_as) == sites.resolve(known_as)
        assert same == (known_as not in sites.read_only), known_as


@pytest.mark.parametrize("letter, legacy", [("S", "hook_resid_pre"), ("T", "hook_attn_out"), ("C", "hook_mlp_out")])
@families
def test_letters_are_what_the_bridge_calls_them(name: str, letter: str, legacy: str) -> None:
    """S, T and C of every layer, and the residual stream that leaves the last."""
    sites = table(decoder(name).config)
    last = decoder(name).config.num_layers - 1
    names = [f"blocks.{layer}.{legacy}" for layer in range(last + 1)]
    names += [f"blocks.{last}.hook_resid_post"] if letter == "S" else []
    assert len(sites.letter(letter)) == len(names)
    for site, known_as in zip(sites.letter(letter), names, strict=True):
        assert compare(name, site, known_as) < TOLERANCE


@families
def test_letters_without_a_config(name: str) -> None:
    """The names alone, new or legacy, give the letters that the config gives. Of T and C the norms are told or seen."""
    sites = table(decoder(name).config)
    wanted = {letter: dict(enumerate(sites.per_layer(letter))) for letter in "STC"}
    assert by_letter(sites.sites) == wanted == by_letter([*sites.sites, *sites.aliases])
    legacy = by_letter(sites.aliases)
    if not decoder(name).config.post_norms:
        assert {letter: {n: sites.resolve(site) for n, site in at.items()} for letter, at in legacy.items()} == wanted
        return
    before_norms = [site for site in sites.sites if site.endswith(("attn.hook_out", "mlp.hook_out"))]
    assert by_letter(before_norms, post_norms=True) == {} != by_letter(before_norms)


def test_letters_of_a_part_of_the_names() -> None:
    """The stream that leaves a block is the next layer's S, unless what enters that layer is there too."""
    assert by_letter(["blocks.3.hook_resid_post", "embed.hook_out"]) == {"S": {4: "blocks.3.hook_resid_post"}}
    assert by_letter(["blocks.3.hook_out", "blocks.4.hook_resid_pre"]) == {"S": {4: "blocks.4.hook_resid_pre"}}
    assert by_letter(["layers.3.out", "X"]) == {}


@families
def test_oracle_tells_the_sites_apart(name: str) -> None:
    """Negative control: no S, T or C site equals another one."""
    sites = table(decoder(name).config)
    names = [*sites.letter("S"), *sites.letter("T"), *sites.letter("C")]
    for a in names:
        assert [b for b in names if compare(name, a, b) < TOLERANCE] == [a]


@pytest.mark.parametrize("name", ["llama", "llama3", "qwen2", "qwen3", "neox", "neox-sequential"])
def test_rotated_q_and_k_give_the_bridges_pattern(name: str) -> None:
    """The bridge has no rotated q and k for GPT-NeoX, so they are checked through the pattern."""
    config = decoder(name).config
    assert config.rotary_dim and not config.windows and not config.attn_softcap  # the formula below has neither
    for layer in range(config.num_layers):
        q, k = (captured(name)[f"blocks.{layer}.attn.hook_rot_{x}"].unflatten(0, (SEQUENCES, LENGTH)) for x in "qk")
        scores = torch.einsum("sqhd,skhd->shqk", q, k.repeat_interleave(config.group, dim=2)) * config.scale
        future = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)
        pattern = scores.masked_fill(future, float("-inf")).softmax(-1)
        assert float((pattern - bridged(name)[f"blocks.{layer}.attn.hook_pattern"]).abs().max()) < TOLERANCE


# The table


@families
def test_table_lists_what_a_pass_comes_by(name: str) -> None:
    """The table lists the sites that a tap sees, in the same order and with the same shapes."""
    sites = table(decoder(name).config)
    assert sites.in_order() == list(captured(name)) and set(sites.in_order()) == set(sites.sites)
    seen = list(captured(name))
    names, lens = sites.select(seen)
    assert set(names) == set(seen) and not lens
    assert list(sites.select("STC")[0]) == sorted(sites.select("STC")[0], key=seen.index)
    for site, value in captured(name).items():
        keys = (LENGTH,) if site.endswith(KEY_SITES) else ()
        shape = sites.sites[site].shape
        assert tuple(value.shape) == (SEQUENCES * LENGTH, *(shape[:-1] + keys if keys else shape)), site
        assert sites.sites[site].layer == (int(site.split(".")[1]) if site.startswith("blocks.") else None)


@pytest.mark.parametrize("names", [WIRINGS, pytest.param((*NAMES, *MORE), marks=pytest.mark.slow)], ids=["wirings", "all"])
def test_sites_come_in_the_order_of_a_pass(names: tuple[str, ...]) -> None:
    """As a tap sees them in an engine's pass: norms before or after a rotation, latents, gates, mixers next to attention."""
    for name in names:
        subject = Engine(decoder(name))
        tap = PassTap(frozenset(subject.sites.sites))
        with modes.canonical():
            whole = subject.runner.whole([3, 4, 5], (), tap)
            subject.model.logits(whole.residual, subject.runner.head_ops(), tap)
        assert list(tap.values) == subject.sites.in_order(), name


def llama() -> SiteTable:
    return table(decoder("llama").config)


def test_select_reads_all_spellings() -> None:
    """Letters together or apart, names, aliases, strings and lists give the same sites, each once. Z is kept apart."""
    sites = llama()
    assert sites.select("STCZ") == (sites.select("STC")[0], True)
    assert sites.select("S,T") == sites.select("S T") == sites.select(["S", "T"]) == sites.select(("TS",))
    assert sites.select("S,T")[0] == sites.select("ST")[0]
    assert sites.select("Z") == ((), True)
    for given in (["Z", "S"], "Z,S", ["S", "Z", "T"], "ZT,S"):
        assert sites.select(given)[1] and len(sites.select(given)[0]) > 0, "Z may come before others"
    assert sites.select("") == sites.select([]) == ((), False)
    names, lens = sites.select(["C", "blocks.1.hook_mlp_out", "blocks.0.hook_resid_pre", "Z"])
    assert names == ("blocks.0.hook_in", *(f"blocks.{layer}.mlp.hook_out" for layer in range(3))) and lens


def test_gemma_writes_what_its_post_norms_give() -> None:
    """With a norm after attention and MLP, T and C are what reaches the residual stream, not what enters the norm."""
    sites = table(decoder("gemma2").config)
    assert sites.letter("T") == [f"blocks.{layer}.ln1_post.hook_out" for layer in range(3)]
    assert sites.letter("C") == [f"blocks.{layer}.ln2_post.hook_out" for layer in range(3)]
    assert sites.sites["blocks.0.attn.hook_out"].aliases == ()
    seen = captured("gemma2")
    written = seen["blocks.0.hook_in"] + seen["blocks.0.ln1_post.hook_out"]
    assert torch.equal(written, seen["blocks.0.ln2.hook_in"])


@pytest.mark.parametrize(
    "wrong, near",
    [
        ("blocks.0.hook_resid_prE", "blocks.0.hook_resid_pre"),
        ("blocks.1.atn.hook_out", "blocks.1.attn.hook_out"),
        ("blocks.0.mlp.hook_pst", "blocks.0.mlp.hook_post"),
        ("blocks.3.hook_in", "blocks.2.hook_in"),  # no such layer
        ("embed", "embed.hook_out"),
    ],
)
def test_unknown_name_lists_the_nearest(wrong: str, near: str) -> None:
    """A misspelt name raises a KeyError whose text, not its repr, suggests the nearest names."""
    for ask in (llama().resolve, llama().select):
        with pytest.raises(KeyError) as caught:
            ask(wrong)
        assert isinstance(caught.value, UnknownSite)
        assert str(caught.value).startswith(f"Unknown site {wrong!r}") and near in str(caught.value)


@pytest.mark.parametrize("letter", "STCZ")
@pytest.mark.parametrize("thinks", [False, True])
def test_a_letter_names_what_it_selects(letter: str, thinks: bool) -> None:
    """`letter` and `select` agree for both kinds of model. Thoughts have sites beside those of the layers."""
    table = ThinkingSites(llama().config) if thinks else llama()
    assert set(table.select(letter)[0]) == set(table.letter(letter))
    thoughts = [name for name in table.letter(letter) if "thinking." in name or "compress." in name]
    assert bool(thoughts) == thinks
    if letter != "Z":
        assert [name for name in table.letter(letter) if name not in thoughts] == table.per_layer(letter)


@pytest.mark.parametrize("word", ["X", "s", "STX", "STCZX"])
def test_unknown_letter_is_refused(word: str) -> None:
    """An unknown letter is refused, also among known ones. Letters are capital."""
    with pytest.raises(UnknownSite, match="Letters: STCZ"):
        llama().select(word)
    with pytest.raises(UnknownSite, match="Known: S, T, C, Z"):
        llama().letter(word)


@pytest.mark.parametrize(
    "name, absent",
    [
        ("llama", "pos_embed.hook_out"),
        ("llama", "blocks.0.ln1_post.hook_out"),
        ("gpt2", "blocks.0.mlp.gate.hook_out"),
        ("gpt2", "blocks.0.attn.hook_rot_q"),
        ("neox", "blocks.0.hook_resid_mid"),
    ],
)
def test_sites_of_other_families_are_unknown(name: str, absent: str) -> None:
    """A model has no site for a part that it lacks."""
    with pytest.raises(UnknownSite):
        table(decoder(name).config).resolve(absent)


# Taps


@families
def test_watching_changes_no_bits(name: str) -> None:
    """Capturing sites, one by one, leaves the logits' bits alone.

    Pattern and scores are the exception: to show them, attention is computed explicitly.
    """
    plain = logits(decoder(name), tokens())
    for site in table(decoder(name).config).sites:
        tap = Capture(site)
        watched = logits(decoder(name), tokens(), tap)
        assert list(tap.seen) == [site]
        if not site.endswith(KEY_SITES):
            assert all(torch.equal(a, b) for a, b in zip(plain, watched, strict=True)), site


@families
def test_replacing_a_site_reaches_everything_after_it(name: str) -> None:
    """A tap that edits a site: earlier sites keep their bits, the site's residual stream and the logits change."""
    sites = table(decoder(name).config)
    order = list(captured(name))
    for site in (s for letter in "STC" for s in sites.letter(letter)):
        edits = ReplaceAndWatch(site)
        edited = logits(decoder(name), tokens(), edits)
        before = order[: order.index(site) + 1]
        assert all(torch.equal(edits.seen[s], captured(name)[s]) for s in before), site
        after = sites.letter("S")[-1] if site != sites.letter("S")[-1] else "ln_final.hook_out"
        assert not torch.equal(edits.seen[after], captured(name)[after]), site
        assert not torch.equal(torch.cat(edited), torch.cat(logits(decoder(name), tokens()))), site


class ReplaceAndWatch(Capture):
    """Adds noise at one site, and records every site."""

    def __init__(self, site: str) -> None:
        super().__init__()
        self.site = site

    def __call__(self, site: str, value: Tensor) -> Tensor:
        self.seen[site] = value
        noise = torch.randn(value.shape, generator=torch.Generator().manual_seed(5))
        return value + noise if site == self.site else value


@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma2", "neox"])
@torch.no_grad()
def test_replacing_is_what_the_bridge_does(name: str) -> None:
    """The same edit at the same name gives the bridge's logits, so edits mean the same in both."""
    sites = table(decoder(name).config)
    for site in (sites.letter("S")[1], sites.letter("T")[1], sites.letter("C")[1], "unembed.hook_out"):
        ours = torch.stack(logits(decoder(name), tokens(), Replace(site)))
        theirs = bridge(name).run_with_hooks(
            torch.stack(tokens()), fwd_hooks=[(site, lambda value, hook: value + 1)], return_type="logits"
        )
        assert float((ours - theirs).abs().max()) < TOLERANCE, site


def test_pattern_of_ragged_sequences_is_refused() -> None:
    """The pattern of ragged sequences is not a tensor. The error says so instead of padding."""
    with pytest.raises(ValueError, match="ragged"):
        logits(decoder("llama"), sequences((3, 5)), Capture("blocks.0.attn.hook_pattern"))


@pytest.mark.parametrize(
    ("name", "reads", "edited"),
    [
        ("olmo2", {"attn.hook_in": "hook_in", "attn.q.hook_in": "hook_in", "mlp.hook_in": "ln2.hook_in"}, ()),
        (
            "phi-plain",
            {"attn.hook_in": "ln1.hook_out", "mlp.hook_in": "ln1.hook_out", "mlp.in.hook_in": "ln1.hook_out"},
            ("attn.hook_in", "mlp.in.hook_in"),
        ),
        (
            "llama",
            {"attn.hook_in": "ln1.hook_out", "attn.q.hook_in": "ln1.hook_out", "mlp.hook_in": "ln2.hook_out"},
            ("attn.hook_in", "mlp.hook_in"),
        ),
    ],
)
def test_what_a_model_without_a_norm_reads_is_not_edited_there(
    name: str, reads: dict[str, str], edited: tuple[str, ...]
) -> None:
    """Its attention or MLP reads what others read too, such as the stream: the name has that value, and takes no edit."""
    sites = table(load(hugging_face(name)).config)
    for own, site in reads.items():
        assert sites.names[f"blocks.1.{own}"] == f"blocks.1.{site}"
        assert (f"blocks.1.{own}" in sites.read_only) is (own not in edited), own


def test_sites_of_a_letter_are_in_the_order_of_layers() -> None:
    found = by_layer(["blocks.1.hook_out", "blocks.1.hook_in", "blocks.0.hook_in"])
    assert list(found.items()) == [(0, "blocks.0.hook_in"), (1, "blocks.1.hook_in"), (2, "blocks.1.hook_out")]

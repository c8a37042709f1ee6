"""The families that load, by the `model_type` of transformers. `docs/extending.md` adds one."""

from replaylens.engine.errors import UnsupportedModel
from replaylens.engine.model import tables_alibi as alibi
from replaylens.engine.model import tables_gpt as gpt
from replaylens.engine.model import tables_latent as latent
from replaylens.engine.model import tables_llama as llama
from replaylens.engine.model import tables_moe as moe
from replaylens.engine.model import tables_neox as neox
from replaylens.engine.model import tables_pairs as pairs
from replaylens.engine.model.family import Family, Raw
from replaylens.engine.model.refusals import refusal

FAMILIES: dict[str, Family] = {
    "llama": llama.LLAMA,
    "mistral": llama.MISTRAL,
    "ministral": llama.MINISTRAL,
    "qwen2": llama.QWEN2,
    "qwen3": llama.QWEN3,
    "gemma": llama.GEMMA,
    "gemma2": llama.GEMMA2,
    "gemma3_text": llama.GEMMA3,
    "vaultgemma": llama.VAULTGEMMA,
    "phi": llama.PHI,
    "phi3": llama.PHI3,
    "olmo": llama.OLMO,
    "olmo2": llama.OLMO2,
    "olmo3": llama.OLMO3,
    "smollm3": llama.SMOLLM3,
    "granite": llama.GRANITE,
    "stablelm": llama.STABLELM,
    "starcoder2": llama.STARCODER2,
    "cohere": pairs.COHERE,
    "cohere2": pairs.COHERE2,
    "glm": pairs.GLM,
    "glm4": pairs.GLM4,
    "nemotron": llama.NEMOTRON,
    "arcee": llama.ARCEE,
    "exaone4": llama.EXAONE4,
    "hunyuan_v1_dense": llama.HUNYUAN,
    "helium": pairs.HELIUM,
    "ernie4_5": pairs.ERNIE,
    "seed_oss": llama.SEED_OSS,
    "cwm": llama.CWM,
    "deepseek_v2": latent.DEEPSEEK_V2,
    "deepseek_v3": latent.DEEPSEEK_V3,
    "glm4_moe_lite": latent.GLM4_MOE_LITE,
    "minicpm3": latent.MINICPM3,
    "youtu": latent.YOUTU,
    "gpt2": gpt.GPT2,
    "gpt_bigcode": gpt.GPT_BIGCODE,
    "persimmon": neox.PERSIMMON,
    "gpt_neo": gpt.GPT_NEO,
    "gpt_neox": neox.NEOX,
    "gptj": neox.GPTJ,
    "opt": gpt.OPT,
    "falcon": neox.FALCON,
    "bloom": alibi.BLOOM,
    "mpt": alibi.MPT,
    "mixtral": moe.MIXTRAL,
    "phimoe": moe.PHIMOE,
    "granitemoe": moe.GRANITEMOE,
    "qwen2_moe": moe.QWEN2_MOE,
    "qwen3_moe": moe.QWEN3_MOE,
    "olmoe": moe.OLMOE,
    "gpt_oss": moe.GPT_OSS,
    "flex_olmo": moe.FLEX_OLMO,
    "dots1": moe.DOTS1,
    "glm4_moe": moe.GLM4_MOE,
}


def family_of(raw: Raw) -> str:
    """The family of a Hugging Face config; UnsupportedModel says what an unknown one lacks, and what comes closest."""
    name = str(raw.get("model_type"))
    if name not in FAMILIES:
        raise UnsupportedModel(refusal(name, FAMILIES, raw))
    return name

"""Where a verifier's weight files have its embedding, head and final norm: for what is checked of
them before the load."""

from common.verifier.config import Verifier

# What families call their modules; where a file has several of one kind, the first named here.
TENSORS = {
    "embed_tokens": (
        "embed_tokens", "word_embeddings", "tok_embeddings", "wte", "embed_in", "embeddings",
        "embedding", "embed",
    ),
    "lm_head": ("lm_head", "output", "embed_out", "output_layer", "head"),
    "norm": (
        "norm", "norm_f", "ln_f", "final_layernorm", "final_layer_norm", "final_norm",
        "embedding_norm",
    ),
}  # fmt: skip


def find_modules(verifier: Verifier, where: dict[str, str]) -> dict[str, str]:
    """Names of the text model's embedding, head and final norm, of those that are known.

    Of a wrapper's models the text model is the one with config.json's layers. The norm stands
    beside the embedding, the head there or further out; a tied head is the embedding.

    Args:
        where: tensor name → file. A module is there whatever its tensors: lm_head.qweight too.
    """
    present = {key.rpartition(".")[0] for key in where}
    embeddings = [
        module
        for module in present
        if module.split(".")[-1] in TENSORS["embed_tokens"] and not in_layer(module)
    ]
    if not embeddings:
        return {}
    embedding = min(embeddings, key=lambda module: rank_embedding(module, verifier, present))
    parents = embedding.split(".")[:-1]
    outwards = [".".join(parents[:n]) for n in range(len(parents) + 1)]  # the root first
    places = {"lm_head": outwards, "norm": outwards[-1:]}
    modules = {"embed_tokens": embedding}
    for name, folders in places.items():
        known = [f"{folder}.{m}".lstrip(".") for m in TENSORS[name] for folder in folders]
        module = next((m for m in known if m in present), None)
        if module is not None:
            modules[name] = module
    if tied(verifier):
        modules.setdefault("lm_head", embedding)
    return modules


def in_layer(name: str) -> bool:
    return any(part.isdigit() for part in name.split("."))


def rank_embedding(
    module: str, verifier: Verifier, present: set[str]
) -> tuple[bool, int, int, str]:
    """Sorts embeddings: that of the model with config.json's layers, then the best-known name."""
    inside, last = f"{module.rpartition('.')[0]}.".lstrip("."), f".{verifier.num_layers - 1}."
    text = any(m.startswith(inside) and last in m[len(inside) :] for m in present)
    return not text, TENSORS["embed_tokens"].index(module.split(".")[-1]), len(module), module


def tied(verifier: Verifier) -> bool:
    """Whether config.json lets the head be the embedding: a wrapper's word counts, as in vLLM."""
    value = verifier.config.get("tie_word_embeddings")
    if value is None:
        value = verifier.text.get("tie_word_embeddings")
    return True if value is None else bool(value)  # transformers' default is True

"""Whether a model can be spread the way a shape says. Every problem at once."""

from __future__ import annotations

from disagg.catalog.model import (
    Attention,
    DenseMlp,
    LatentAttention,
    LinearAttention,
    Mlp,
    Model,
    MoeMlp,
    SoftmaxAttention,
)
from disagg.cost.plan import Shape
from disagg.errors import Problem


def shape_problems(model: Model, shape: Shape, where: str = "") -> list[Problem]:
    """What is wrong with a shape for a model.

    Args:
        model: The model.
        shape: How it is to be spread.
        where: Put before the names of the fields: `prefill ` gives `prefill tensor`.

    Returns:
        One problem per cause; empty if the shape is possible.
    """
    fields = {
        "tensor": shape.tensor,
        "pipeline": shape.pipeline,
        "expert": shape.expert,
        "attention data": shape.attention_data,
        "context": shape.context,
    }
    low = [Problem(f"{where}{name}", f"must be 1 at least, not {n}") for name, n in fields.items() if n < 1]
    if low:
        return low
    problems = _of_ranks(shape, where)
    if shape.pipeline > model.layers:
        message = f"{shape.pipeline} stages are more than the {model.layers} layers of {model.name}"
        problems.append(Problem(f"{where}pipeline", message))
    if problems:
        return problems
    found: dict[tuple[str, str], None] = {}
    for block in model.blocks:
        for field, message in (*_of_attention(block.attention, shape), *_of_mlp(block.mlp, shape)):
            found.setdefault((field, f"{message} of {model.name}"))
    if shape.expert > 1 and not any(isinstance(block.mlp, MoeMlp) for block in model.blocks):
        found.setdefault(("expert", f"{model.name} has no experts to spread over {shape.expert} ranks"))
    return [Problem(f"{where}{field}", message) for field, message in found]


def _of_ranks(shape: Shape, where: str) -> list[Problem]:
    problems = []

    def refuse(field: str, message: str) -> None:
        problems.append(Problem(f"{where}{field}", message))

    if shape.tensor % shape.attention_data:
        refuse("attention data", f"{shape.attention_data} does not divide the {shape.tensor} tensor-parallel ranks")
    elif shape.attention_tensor % shape.context:
        refuse("context", f"{shape.context} does not divide the {shape.attention_tensor} ranks of an attention group")
    dense = shape.tensor * shape.pipeline
    if shape.expert > dense and shape.expert % dense:
        refuse("expert", f"{shape.expert} is no multiple of the {dense} ranks of tensor x pipeline")
    elif shape.stage_devices % shape.expert_ranks:
        refuse("expert", f"{shape.expert} does not divide the {shape.stage_devices} devices of a stage")
    return problems


def _of_attention(attention: Attention | None, shape: Shape) -> list[tuple[str, str]]:
    ranks, problems = shape.attention_tensor, []
    match attention:
        case SoftmaxAttention():
            if attention.heads % ranks:
                problems.append(("tensor", f"{ranks} ranks do not divide the {attention.heads} heads"))
            if attention.kv_heads % ranks and ranks % attention.kv_heads:
                problems.append(("tensor", f"{ranks} ranks do not fit the {attention.kv_heads} KV heads"))
        case LatentAttention():
            if attention.heads % ranks:
                problems.append(("tensor", f"{ranks} ranks do not divide the {attention.heads} heads"))
        case LinearAttention():
            if attention.value_heads % ranks or (attention.key_heads % ranks and ranks % attention.key_heads):
                heads = f"{attention.key_heads} key and {attention.value_heads} value heads"
                problems.append(("tensor", f"{ranks} ranks do not divide the {heads}"))
        case None:
            pass
    return problems


def _of_mlp(mlp: Mlp | None, shape: Shape) -> list[tuple[str, str]]:
    match mlp:
        case DenseMlp() if mlp.width % shape.tensor:
            return [("tensor", f"{shape.tensor} ranks do not divide the inner width {mlp.width}")]
        case MoeMlp() if mlp.experts % shape.expert_ranks:
            return [("expert", f"{shape.expert_ranks} ranks do not divide the {mlp.experts} experts")]
        case MoeMlp() if mlp.width % shape.expert_tensor:
            return [("tensor", f"{shape.expert_tensor} ranks per expert do not divide its inner width {mlp.width}")]
        case _:
            return []

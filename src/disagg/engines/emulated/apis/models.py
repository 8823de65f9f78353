"""`/v1/models`."""

from __future__ import annotations

from uuid import uuid4

from disagg.engines.emulated.settings import EngineSettings


def model_list(settings: EngineSettings, created: int) -> dict[str, object]:
    """Served names, then adapters."""
    base = settings.served_model_names[0]
    cards = [
        _card(name, settings.model, None, settings.max_model_len, created) for name in settings.served_model_names
    ]
    cards += [_card(name, path, base, None, created) for name, path in settings.lora_modules]
    return {"object": "list", "data": cards}


def _card(name: str, root: str, parent: str | None, limit: int | None, created: int) -> dict[str, object]:
    permission = {
        "id": f"modelperm-{uuid4().hex[:16]}",
        "object": "model_permission",
        "created": created,
        "allow_create_engine": False,
        "allow_sampling": True,
        "allow_logprobs": True,
        "allow_search_indices": False,
        "allow_view": True,
        "allow_fine_tuning": False,
        "organization": "*",
        "group": None,
        "is_blocking": False,
    }
    return {
        "id": name,
        "object": "model",
        "created": created,
        "owned_by": "vllm",
        "root": root,
        "parent": parent,
        "max_model_len": limit,
        "permission": [permission],
    }

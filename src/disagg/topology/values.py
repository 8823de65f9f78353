"""The kinds of values that a topology file holds, with their bounds and the spellings that are accepted."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, JsonValue

from disagg.topology import forms

_SUFFIXED = Annotated[str, Field(pattern=r"^[0-9]+(\.[0-9]+)?[kKmMgG]$")]

Port = Annotated[int, Field(ge=1, le=65535)]
Ports = Annotated[
    tuple[Port, ...],
    Field(min_length=1),
    BeforeValidator(forms.port_list, json_schema_input_type=tuple[Port, ...] | Port | str),
]
Group = Annotated[
    str,
    BeforeValidator(forms.device_group, json_schema_input_type=str | int | tuple[Annotated[int, Field(ge=0)], ...]),
]
Groups = Annotated[
    tuple[Group, ...],
    Field(min_length=1),
    BeforeValidator(forms.group_list, json_schema_input_type=tuple[Group, ...] | Group),
]
Name = Annotated[
    str,
    Field(min_length=1, max_length=4096, json_schema_extra={"pattern": forms.PLAIN_NAME}),
    AfterValidator(forms.plain_name),
]
Folder = Annotated[
    str,
    Field(min_length=1, max_length=4096, json_schema_extra={"pattern": forms.ONE_LINE}),
    AfterValidator(forms.one_line),
]
HttpUrl = Annotated[
    str,
    Field(max_length=4096, json_schema_extra={"pattern": forms.HTTP_URL}),
    AfterValidator(forms.one_line),
    AfterValidator(forms.http_url),
]
Host = Annotated[
    str,
    Field(min_length=1, json_schema_extra={"pattern": forms.HOST_NAME}),
    AfterValidator(forms.host_name),
]
Names = Annotated[
    tuple[Name, ...],
    Field(min_length=1),
    BeforeValidator(forms.name_list, json_schema_input_type=tuple[Name, ...] | Name),
]
Count = Annotated[
    int,
    Field(ge=1, le=1_000_000),
    BeforeValidator(forms.whole_number, json_schema_input_type=Annotated[int, Field(ge=1, le=1_000_000)] | _SUFFIXED),
]
Tokens = Annotated[
    int,
    Field(ge=1, le=100_000_000),
    BeforeValidator(
        forms.whole_number, json_schema_input_type=Annotated[int, Field(ge=1, le=100_000_000)] | _SUFFIXED
    ),
]
Seconds = Annotated[float, Field(gt=0, le=86_400)]
Rate = Annotated[float, Field(gt=0, le=1_000_000)]
JsonMap = dict[str, JsonValue]
SpeculativeConfig = Annotated[JsonMap, BeforeValidator(forms.json_map, json_schema_input_type=JsonMap | str)]
QaicConfig = Annotated[JsonMap, BeforeValidator(forms.qaic_config, json_schema_input_type=JsonMap | str)]
EngineArgs = dict[Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.+-]{0,199}$")], JsonValue]
Env = dict[
    Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]{0,199}$")],
    Annotated[
        str,
        Field(pattern=r"^[^\x00]*$"),
        BeforeValidator(forms.env_value, json_schema_input_type=str | int),
    ],
]
KvCacheDtype = Literal["auto", "bf16", "fp16", "fp8", "fp8_e4m3", "fp8_e5m2", "int8", "mxint8", "float16", "bfloat16"]


class Spec(BaseModel):
    """Base of all parts of a topology: frozen, and an unknown key is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, protected_namespaces=())

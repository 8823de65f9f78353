"""What prices a pool's steps, and how firm its answers are."""

from __future__ import annotations

from pathlib import Path

from disagg.cost.anchor_file import read_anchors
from disagg.cost.anchored import AnchoredModel, Standing
from disagg.cost.anchors import Anchor
from disagg.cost.plan import Replica
from disagg.cost.step import StepModel
from disagg.cost.work import Pricer, Work
from disagg.errors import ConfigError, Problem
from disagg.project.result import Basis
from disagg.topology.projection_spec import Projection
from disagg.topology.spec import Stage

_MAX_BYTES = 16 * 1024**2


def pricer_of(settings: Projection, stage: Stage, replica: Replica, step_tokens: int) -> Pricer:
    """The cost model, corrected by the anchors that are given for a stage.

    Args:
        settings: Name the anchors' files, and whether they count.
        stage: Whose steps.
        replica: What computes them.
        step_tokens: Tokens that a sequence computes in a decode step.

    Raises:
        ConfigError: If a file cannot be read or is wrong, if no anchor was measured under the same regime, or if
            measured times are asked for and there are none.
    """
    place = f"{stage}_anchors" if stage in (Stage.PREFILL, Stage.DECODE) else "anchors"
    names = getattr(settings, place) or settings.anchors or ()
    if settings.profiling_mode == "simulate" or stage is Stage.ENCODE:
        return StepModel(replica)
    if not names:
        if settings.profiling_mode == "benchmark":
            raise ConfigError([Problem("projection.profiling_mode", _NO_MEASUREMENT)])
        return StepModel(replica)
    return AnchoredModel(replica, _read(names), step_tokens)


_NO_MEASUREMENT = (
    "benchmark needs measured step times: give --anchors FILE (or --prefill-anchors and --decode-anchors), measure "
    "them on the devices, or use --profiling-mode simulate, which needs none"
)


def _read(names: tuple[str, ...]) -> tuple[Anchor, ...]:
    anchors: list[Anchor] = []
    problems: list[Problem] = []
    for name in names:
        try:
            raw = Path(name).expanduser().read_bytes()
            if len(raw) > _MAX_BYTES:
                raise ConfigError([Problem(name, f"is larger than {_MAX_BYTES // 1024**2} MiB")])
            anchors += read_anchors(raw.decode(), name)
        except OSError as error:
            problems.append(Problem("projection.anchors", f"{name} cannot be read: {error.strerror}"))
        except UnicodeDecodeError:
            problems.append(Problem(name, "is not UTF-8 text"))
        except ConfigError as error:
            problems.extend(error.problems)
    if problems:
        raise ConfigError(problems)
    return tuple(anchors)


def basis_of(pricer: Pricer, work: Work) -> Basis:
    """What the price of a step rests on."""
    if not isinstance(pricer, AnchoredModel):
        return Basis.MODELLED
    standing = int(pricer.standing(work).min())
    if standing == Standing.INTERPOLATED:
        return Basis.MEASURED
    return Basis.MODELLED if standing == Standing.MODELLED else Basis.TRANSPORTED

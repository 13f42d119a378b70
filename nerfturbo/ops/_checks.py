"""Argument checks of the public ops, in one error format."""

import torch
from torch import Tensor

from ..errors import InputError, refuse

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def check_shape(name: str, value: Tensor, shape: tuple[int | str, ...]) -> None:
    """`shape` holds numbers that must match and names for free dimensions."""
    if not isinstance(value, Tensor):
        raise InputError(name, "a torch.Tensor", type(value).__name__)
    found = value.shape
    if len(found) == len(shape):  # a loop, for this runs several times per op
        for have, want in zip(found, shape, strict=True):
            if have != want and not isinstance(want, str):
                break
        else:
            return
    wanted = "(" + ", ".join(str(part) for part in shape) + ("," if len(shape) == 1 else "") + ")"
    hint = ""
    if value.dim() == len(shape) + 1 and value.shape[-1] == 1:
        hint = "squeeze the last dimension"
    elif value.dim() + 1 == len(shape):
        hint = "a dimension is missing"
    raise InputError(name, f"shape {wanted}", str(tuple(value.shape)), hint)


def check_dtype(name: str, value: Tensor, *dtypes: torch.dtype) -> None:
    """One of these dtypes; any floating one where none is given."""
    if value.dtype not in (dtypes or FLOATS):
        refuse(not dtypes, name, "a floating dtype", value.dtype, "convert it with .float()")
        raise InputError(name, " or ".join(str(d) for d in dtypes), str(value.dtype))


def check_tensor(name: str, value: Tensor, shape: tuple[int | str, ...], *dtypes: torch.dtype) -> None:
    """`check_shape` and `check_dtype`."""
    check_shape(name, value, shape)
    if value.dtype not in (dtypes or FLOATS):
        check_dtype(name, value, *dtypes)


def check_device(**tensors: Tensor | None) -> None:
    """All given tensors must be on one device."""
    common = None
    for value in tensors.values():
        if value is not None:
            device = value.device
            if common is None:
                common = device
            elif device != common:
                break
    else:
        return
    devices = {name: value.device for name, value in tensors.items() if value is not None}
    got = ", ".join(f"{name} on {device}" for name, device in devices.items())
    raise InputError(" and ".join(devices), "one device", got, "move them with .to(device)")


def check_positive(name: str, value: float, *, zero: bool = False) -> None:
    good = (value >= 0 if zero else value > 0) and value != float("inf")
    refuse(not good, name, "a finite number " + (">= 0" if zero else "> 0"), value)

"""The reference's loss over this backend's `composite`: the rest of it is a few numbers per ray."""

from __future__ import annotations

import functools

from ..reference import composite_loss as reference
from .composite import composite

composite_loss = functools.partial(reference.composite_loss, composite=composite)

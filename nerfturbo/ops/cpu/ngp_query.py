"""Instant-NGP point by point: the reference's composition, whose encoding and networks are this backend's own."""

from __future__ import annotations

from ..reference.ngp_query import ngp_query

__all__ = ["ngp_query"]

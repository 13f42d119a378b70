"""A trained field as 3D Gaussians: seeded from its surfaces, refined by a differentiable rasteriser, written to files.

Splats are rows (n, 59) in the order of their file: position 3, colour as spherical harmonics (constant terms 3, then 15
of red, of green, of blue), opacity as a logit, scales as logarithms 3, rotation as a quaternion (w, x, y, z) 4.
"""

WIDTHS = (3, 3, 45, 1, 3, 4)
POINT, BASE, REST, OPACITY, SCALES, TURN = (slice(sum(WIDTHS[:k]), sum(WIDTHS[: k + 1])) for k in range(6))
N_VALUES = sum(WIDTHS)

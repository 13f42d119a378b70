"""The public names of nerfacc and tiny-cuda-nn over this package's kernels, so that their users switch by one line.

    import nerfturbo.compat.nerfacc as nerfacc          # in place of: import nerfacc
    import nerfturbo.compat.tinycudann as tcnn          # in place of: import tinycudann as tcnn

or, for code that cannot be edited, before its first import:

    nerfturbo.compat.install()                          # `import nerfacc` and `import tinycudann` give these

docs/migration/ says what differs from the originals, and how to go further.
"""

from ._install import install, uninstall

__all__ = ["install", "uninstall"]

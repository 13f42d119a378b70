"""The release of nerfacc whose interface this package has."""

__version__ = "0.5.3"

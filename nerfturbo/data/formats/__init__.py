"""Formats of scene folders, one file each; `scene.scene_formats` lists them."""

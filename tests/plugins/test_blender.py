"""The add-on in a real Blender, where there is one: cameras go in, a path comes back."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from nerfturbo import Scene
from nerfturbo.evaluation.camera_path import read_camera_path
from nerfturbo.export.cameras import write_cameras

from ..tiny import ball_scene

BLENDER = shutil.which("blender")
ADD_ON = Path(__file__).parents[2] / "nerfturbo_plugins" / "blender.py"
pytestmark = pytest.mark.skipif(BLENDER is None, reason="blender is not installed")
WALK = """
import runpy, sys
import bpy
from mathutils import Matrix
addon = runpy.run_path({addon!r})
addon["import_scene"]({cameras!r}, {mesh!r})
root, scene = bpy.data.objects["nerfturbo"], bpy.context.scene
root.matrix_world = Matrix.Translation((1, 2, 3)) @ Matrix.Rotation(0.7, 4, "X") @ Matrix.Scale(2.0, 4)
views = sorted((one for one in bpy.data.objects if one.name.startswith("view ")), key=lambda one: one.name)
scene.frame_start, scene.frame_end = 1, len(views)
for number, view in enumerate(views, 1):
    scene.timeline_markers.new(view.name, frame=number).camera = view
meshes = lambda: [one for one in bpy.data.objects if one.type == "MESH" and one.parent is root]
(mesh,) = meshes()
kinds = [node.bl_idname for node in mesh.data.materials[0].node_tree.nodes if node.outputs or node.inputs[0].is_linked]
assert kinds == ["ShaderNodeVertexColor", "ShaderNodeOutputMaterial"], kinds
addon["export_path"]({path!r})
addon["register"]()
assert bpy.ops.nerfturbo.import_scene(filepath={cameras!r}) == {{"FINISHED"}}  # takes the .ply, not the .glb
assert len(meshes()) == 2
assert bpy.ops.nerfturbo.export_path(filepath={again!r}) == {{"FINISHED"}}
addon["unregister"]()
"""
PLY = "ply\nformat ascii 1.0\nelement vertex 3\nproperty float x\nproperty float y\nproperty float z\n"
PLY += "".join(f"property uchar {name}\n" for name in ("red", "green", "blue"))
PLY += "element face 1\nproperty list uchar int vertex_indices\nend_header\n"
PLY += "0 0 0 255 0 0\n1 0 0 0 255 0\n0 1 0 0 0 255\n3 0 1 2\n"


def views(scene: Scene, folder: Path) -> Path:
    write_cameras(folder / "cameras.json", [scene])
    (folder / "mesh.ply").write_text(PLY)
    (folder / "mesh.glb").write_text("stands beside it")
    return folder / "cameras.json"


def test_cameras_go_to_blender_and_come_back_as_a_path(tmp_path: Path) -> None:
    scene = ball_scene("train")
    names = {"addon": str(ADD_ON), "cameras": str(views(scene, tmp_path)), "mesh": str(tmp_path / "mesh.ply")}
    names |= {"path": str(tmp_path / "path.json"), "again": str(tmp_path / "again.json")}
    (tmp_path / "walk.py").write_text(WALK.format(**names))
    words = [str(BLENDER), "--background", "--factory-startup", "--python-exit-code", "3", "--python"]
    run = subprocess.run([*words, str(tmp_path / "walk.py")], capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stdout[-2000:] + run.stderr[-2000:]
    found = read_camera_path(tmp_path / "path.json", scene.to_original).cameras
    assert len(found) == len(scene) and found.size.tolist() == scene.cameras.size.tolist()
    torch.testing.assert_close(found.camera_to_world, scene.cameras.camera_to_world, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(found.focal, scene.cameras.focal, atol=1e-3, rtol=1e-5)
    assert (tmp_path / "again.json").read_text() == (tmp_path / "path.json").read_text()


def test_it_stays_one_short_file() -> None:
    assert len(ADD_ON.read_text().splitlines()) <= 150

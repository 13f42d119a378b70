"""A scene in Blender, and a camera path back. An add-on of one file (Edit > Preferences): File > Import > nerfturbo
scene, File > Export > nerfturbo camera path. From a terminal:

    nerfturbo export cameras RUN cameras.json
    nerfturbo export mesh RUN mesh.ply
    blender --python blender.py -- import cameras.json mesh.ply
    blender --background scene.blend --python blender.py -- export path.json    # for nerfturbo render RUN --path

Everything hangs from an empty named nerfturbo: move, turn or scale it, and what is exported is seen from it."""

import json
import math
import sys
from pathlib import Path
from typing import Any

import bpy  # pyright: ignore[reportMissingImports]
from mathutils import Matrix  # pyright: ignore[reportMissingImports]

bl_info = {"name": "nerfturbo", "blender": (3, 2, 0), "category": "Import-Export", "location": "File > Import, Export"}
ROOT = "nerfturbo"


def import_scene(cameras: str, mesh: str | None = None) -> int:
    """Every camera of the file, with its photo behind it, and the mesh; how many cameras there are."""
    document = json.loads(Path(cameras).read_text(encoding="utf-8"))
    scene, root = bpy.context.scene, bpy.data.objects.get(ROOT) or bpy.data.objects.new(ROOT, None)
    if root.name not in scene.collection.objects:
        scene.collection.objects.link(root)
    for number, own in enumerate({**document, **frame} for frame in document["frames"]):
        camera = bpy.data.objects.new(f"view {number:04d}", _lens(own, f"view {number:04d}", Path(cameras).parent))
        scene.collection.objects.link(camera)
        camera.parent, camera.matrix_local = root, Matrix(own["transform_matrix"])
        if number == 0:
            scene.camera = camera
            scene.render.resolution_x, scene.render.resolution_y = int(own["w"]), int(own["h"])
    if mesh is not None:
        _read_mesh(mesh).parent = root
    return len(document["frames"])


def _lens(own: dict[str, Any], name: str, folder: Path) -> Any:
    width, height = own["w"], own["h"]
    lens, longest = bpy.data.cameras.new(name), max(width, height)
    lens.sensor_fit = "HORIZONTAL" if width >= height else "VERTICAL"
    sensor = lens.sensor_width if width >= height else lens.sensor_height
    lens.lens = (own["fl_x"] if width >= height else own["fl_y"]) * sensor / longest
    lens.shift_x = (0.5 * width - own.get("cx", 0.5 * width)) / longest
    lens.shift_y = (own.get("cy", 0.5 * height) - 0.5 * height) / longest
    if (photo := folder / str(own.get("file_path", ""))).is_file():
        lens.show_background_images = True
        lens.background_images.new().image = bpy.data.images.load(str(photo), check_existing=True)
    return lens


def _read_mesh(mesh: str) -> Any:
    """A PLY file, whose axes are those of the cameras. It shines by the colours of its vertices, whatever the lamps."""
    if bpy.app.version < (4, 0, 0):
        bpy.ops.import_mesh.ply(filepath=mesh)
    else:
        bpy.ops.wm.ply_import(filepath=mesh, forward_axis="Y", up_axis="Z")
    for layer in (made := bpy.context.view_layer.objects.active).data.color_attributes[:1]:
        made.data.materials.append(material := bpy.data.materials.new(ROOT))
        material.use_nodes = True
        material.node_tree.nodes.clear()
        color, out = (material.node_tree.nodes.new(f"ShaderNode{kind}") for kind in ("VertexColor", "OutputMaterial"))
        color.layer_name = layer.name
        material.node_tree.links.new(color.outputs[0], out.inputs[0])
    return made


def export_path(file: str) -> int:
    """The scene's camera over the frames of the timeline, as `nerfturbo render --path` reads it; how many frames."""
    scene, root = bpy.context.scene, bpy.data.objects.get(ROOT)
    if scene.camera is None:
        raise ValueError("expected a camera in the scene, found none; add one and make it the active camera")
    sides, share = (scene.render.resolution_x, scene.render.resolution_y), scene.render.resolution_percentage / 100.0
    (width, height), now = (round(side * share) for side in sides), scene.frame_current
    frames = []
    for number in range(scene.frame_start, scene.frame_end + 1, scene.frame_step):
        scene.frame_set(number)
        back = Matrix.Identity(4) if root is None else root.matrix_world.inverted()
        place, turn, _ = (back @ scene.camera.matrix_world).decompose()  # without scale: a camera has none
        matrix = Matrix.Translation(place) @ turn.to_matrix().to_4x4()
        pose, angle = [value for row in matrix for value in row], _vertical_angle(scene.camera.data, width, height)
        frames.append({"camera_to_world": pose, "fov": angle, "aspect": width / height})
    scene.frame_set(now)
    document = {"camera_type": "perspective", "render_width": width, "render_height": height, "is_cycle": False}
    document |= {"fps": scene.render.fps / scene.render.fps_base, "camera_path": frames, "keyframes": []}
    Path(file).write_text(json.dumps(document, indent=1), encoding="utf-8")
    return len(frames)


def _vertical_angle(lens: Any, width: int, height: int) -> float:
    """In degrees; a lens is fitted to the width, to the height, or to the longer of both."""
    wide = lens.sensor_fit == "HORIZONTAL" or (lens.sensor_fit == "AUTO" and width >= height)
    sensor = lens.sensor_height if lens.sensor_fit == "VERTICAL" else lens.sensor_width
    return 2.0 * math.degrees(math.atan(0.5 * sensor / lens.lens * height / (width if wide else height)))


class ImportScene(bpy.types.Operator):
    bl_idname, bl_label = "nerfturbo.import_scene", "nerfturbo scene (cameras.json, mesh.ply beside it)"
    filepath: bpy.props.StringProperty(subtype="FILE_PATH")  # type: ignore

    def execute(self, context: Any) -> set[str]:
        beside = sorted(Path(self.filepath).parent.glob("*.ply"))  # others are turned upright and do not fit
        count, name = import_scene(self.filepath, *map(str, beside[:1])), beside[0].name if beside else "none"
        self.report({"INFO"}, f"{count} cameras, mesh: {name}")
        return {"FINISHED"}

    def invoke(self, context: Any, event: Any) -> set[str]:
        context.window_manager.fileselect_add(self)
        return {"RUNNING_MODAL"}


class ExportPath(bpy.types.Operator):
    bl_idname, bl_label = "nerfturbo.export_path", "nerfturbo camera path (.json)"
    filepath: bpy.props.StringProperty(subtype="FILE_PATH", default="path.json")  # type: ignore

    def execute(self, context: Any) -> set[str]:
        self.report({"INFO"}, f"{export_path(self.filepath)} frames; nerfturbo render RUN --path {self.filepath}")
        return {"FINISHED"}

    invoke = ImportScene.invoke


MENUS: list[tuple[Any, str, Any]] = [
    (ImportScene, "TOPBAR_MT_file_import", lambda menu, context: menu.layout.operator(ImportScene.bl_idname)),
    (ExportPath, "TOPBAR_MT_file_export", lambda menu, context: menu.layout.operator(ExportPath.bl_idname)),
]


def register() -> None:
    for kind, menu, entry in MENUS:
        bpy.utils.register_class(kind)
        getattr(bpy.types, menu).append(entry)


def unregister() -> None:
    for kind, menu, entry in MENUS:
        getattr(bpy.types, menu).remove(entry)
        bpy.utils.unregister_class(kind)


if __name__ == "__main__":
    words = sys.argv[sys.argv.index("--") + 1 :] if "--" in sys.argv else []
    if words:
        sys.stdout.write(f"{import_scene(*words[1:]) if words[0] == 'import' else export_path(*words[1:])} cameras\n")
    else:
        register()

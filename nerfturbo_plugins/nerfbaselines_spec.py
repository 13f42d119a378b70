"""What NerfBaselines lists as method `nerfturbo`. It is read where torch may be missing: only names are here."""

from nerfbaselines import register

register(
    {
        "id": "nerfturbo",
        "method_class": "nerfturbo_plugins.nerfbaselines:Nerfturbo",
        "conda": {
            "environment_name": "nerfturbo",
            "python_version": "3.11",
            "install_script": "pip install nerfturbo nerfbaselines",
        },
        "metadata": {
            "name": "nerfturbo",
            "description": "Fast radiance fields in PyTorch; nothing is compiled at install.",
            "licenses": [{"name": "Apache-2.0"}],
        },
        "implementation_status": {"blender": "working", "mipnerf360": "working"},
    }
)

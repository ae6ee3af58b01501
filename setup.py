"""What pyproject.toml cannot say: all folders of hf_vit/ are packages, and the folder training/ is `hf_vit.scripts`."""

from setuptools import find_namespace_packages, setup


def find(folder: str) -> list[str]:
    return find_namespace_packages(include=[folder, f"{folder}.*"], exclude=["*.__pycache__"])


scripts = [name.replace("training", "hf_vit.scripts", 1) for name in find("training")]
setup(packages=[*find("hf_vit"), *scripts], package_dir={"hf_vit.scripts": "training"}, package_data={"": ["*"]})

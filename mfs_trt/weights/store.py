"""WeightStore: the tensors of a family folder, mapped and read on demand."""

from hashlib import sha256
from pathlib import Path

import torch

from mfs_trt.checkpoint.safetensors_file import SafetensorsFile, TensorInfo, tensor_bytes
from mfs_trt.errors import CheckpointError, FamilyError
from mfs_trt.family.spec import FamilySpec, load_family
from mfs_trt.weights.revision import family_revision


class WeightStore:
    """A family folder opened for reading. Tensors are views of mapped files: never written."""

    def __init__(self, folder: Path | str):
        """Raises `FamilyError` when a file or tensor is missing, truncated or of another shape."""
        self.folder = Path(folder)
        self.spec: FamilySpec = load_family(self.folder)
        self._files: dict[str, SafetensorsFile] = {}  # tensor name → its file
        self._infos: dict[str, TensorInfo] = {}
        try:
            for file_name in self.spec.weight_files:
                file = SafetensorsFile(self.folder / file_name)
                for name, info in file.infos().items():
                    self._files[name] = file
                    self._infos[name] = info
        except CheckpointError as error:
            raise FamilyError(str(error)) from None
        self._check()

    def names(self) -> tuple[str, ...]:
        """Names of all tensors, in the order in which they lie in the files."""
        return tuple(self._infos)

    def shape(self, name: str) -> tuple[int, ...]:
        self._require(name)
        return self._infos[name].shape

    def get(self, name: str) -> torch.Tensor:
        """The tensor in its stored dtype; raises `FamilyError` for an unknown name."""
        self._require(name)
        return self._files[name].get(name)

    def head_name(self, tier_index: int) -> str:
        """Name of the LM head matrix that the tier uses: own, shared, or the embedding."""
        return self.spec.head_name(tier_index)

    def norm_name(self, tier_index: int) -> str:
        return self.spec.norm_name(tier_index)

    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(file.path.stat().st_size for file in set(self._files.values()))

    def verify(self) -> None:
        """Read everything; raise `FamilyError` unless the content has the manifest's revision."""
        digests = {name: sha256(tensor_bytes(self.get(name))).hexdigest() for name in self.names()}
        spec = self.spec
        found = family_revision(spec.model, spec.tiers, spec.dtype, digests)
        if found != spec.revision:
            raise FamilyError(
                f"{self.folder}: expected revision {spec.revision}, its content has {found}"
            )

    def _require(self, name: str) -> None:
        if name not in self._infos:
            raise FamilyError(f"{self.folder}: no tensor named {name!r}")

    def _check(self) -> None:
        expected = self.spec.tensor_shapes()
        for name, shape in expected.items():
            info = self._infos.get(name)
            wanted = TensorInfo(shape, self.spec.dtype)
            if info != wanted:
                found = f"{list(info.shape)} {info.dtype}" if info else "nothing"
                raise FamilyError(
                    f"{self.folder}: {name}: expected {list(shape)} {self.spec.dtype}, got {found}"
                )
        extra = [name for name in self._infos if name not in expected]
        if extra:
            raise FamilyError(f"{self.folder}: unknown tensors {', '.join(extra)}")

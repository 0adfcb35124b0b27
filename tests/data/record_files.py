"""Writers of small files of records, for the tests of sources: 20 documents in every format."""

import json
import struct
from pathlib import Path

import numpy as np

from tests.materials import imported

TEXTS = [f"document {i}\r\nline two é \u2028 <|endoftext|>\n" + "word " * i for i in range(20)]


def rows() -> list[dict]:
    return [{"text": text, "id": f"n{i}"} for i, text in enumerate(TEXTS)]


def jsonl(texts=TEXTS, end="\n") -> bytes:
    return end.join(json.dumps({"text": text}, ensure_ascii=False) for text in texts).encode() + end.encode()


def varint(n: int) -> bytes:
    return bytes([n]) if n < 128 else bytes([n & 127 | 128]) + varint(n >> 7)


def field(number: int, data: bytes) -> bytes:
    return varint(number << 3 | 2) + varint(len(data)) + data


def example(**features: bytes) -> bytes:
    """A serialised tf.train.Example of byte features, and of `n`, an integer one."""
    entries = b"".join(field(1, field(1, key.encode()) + field(2, field(1, field(1, value))))
                       for key, value in features.items())
    number = field(1, field(1, b"n") + field(2, field(3, field(1, varint(7)))))
    return field(1, entries + number)


def tfrecord(records) -> bytes:
    crc = imported("google_crc32c")

    def masked(data: bytes) -> bytes:
        value = crc.value(data)
        return struct.pack("<I", ((value >> 15 | value << 17) + 0xA282EAD8) & 0xFFFFFFFF)

    return b"".join((head := struct.pack("<Q", len(record))) + masked(head) + record + masked(record)
                    for record in records)


def write_megatron(stem, documents, dtype="<u2", code=8):
    """A pair of Megatron: documents are lists of sequences of ids."""
    sequences = [np.asarray(ids, dtype) for document in documents for ids in document]
    stem.with_suffix(".bin").write_bytes(b"".join(ids.tobytes() for ids in sequences))
    lengths = np.array([len(ids) for ids in sequences], "<i4")
    offsets = np.cumsum([0, *(ids.nbytes for ids in sequences)])[:-1].astype("<i8")
    ends = np.cumsum([0, *(len(document) for document in documents)]).astype("<i8")
    stem.with_suffix(".idx").write_bytes(
        b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, code, len(sequences), len(ends)) + lengths.tobytes()
        + offsets.tobytes() + ends.tobytes())


def write_tfds(folder: Path) -> Path:
    """A data set of TensorFlow Datasets, with 20 documents in `train` and 3 in `test`, in no order; its folder."""
    tfds = imported("tensorflow_datasets")
    from tensorflow_datasets.core.dataset_metadata import DatasetMetadata

    class Tiny(tfds.core.GeneratorBasedBuilder, skip_registration=True):
        VERSION = tfds.core.Version("1.0.0")

        @classmethod
        def get_metadata(cls):
            return DatasetMetadata(description="", citation="", tags=[])

        def _info(self):
            text = tfds.features.Text()
            return tfds.core.DatasetInfo(builder=self, features=tfds.features.FeaturesDict({"text": text, "id": text}))

        def _split_generators(self, manager):
            return {"train": enumerate(rows()), "test": enumerate(rows()[:3])}

        def _generate_examples(self):
            raise NotImplementedError

    builder = Tiny(data_dir=folder, file_format="array_record")
    builder.download_and_prepare(download_config=tfds.download.DownloadConfig(manual_dir=folder))
    return Path(builder.data_dir)

"""Record what sentence-transformers gives for the export's texts: `python -m tests.support.reference_vectors`.

The export of all-MiniLM-L6-v2 compares itself with these vectors, because it runs where sentence-transformers is not
installed. tests/model/test_reference_vectors.py compares the file with sentence-transformers.
"""

import numpy as np

from tests.support.imports import ROOT
from worker.embed.embedder import OFFICIAL_SHA256
from worker.embed.export_source import CHECK_TOKENS, REFERENCE_VECTORS, TEXTS, texts_sha256
from worker.embed.torch_embedder import SentenceTransformersEmbedder


def main() -> None:
    embedder = SentenceTransformersEmbedder(None, CHECK_TOKENS, 1)
    assert embedder.identity.weights_sha256 == OFFICIAL_SHA256
    embeddings = [embedder.embed(text) for text in TEXTS]
    np.savez(
        ROOT / "worker" / REFERENCE_VECTORS,
        vectors=np.array([it.vector for it in embeddings], "<f4"),
        truncated=np.array([it.truncated for it in embeddings]),
        texts=np.array(texts_sha256()),
    )


if __name__ == "__main__":
    main()

"""Object stores behind one small protocol (`base`): S3 (`s3`) and a local folder (`local`)."""

from trainer.store.base import (
    Exists,
    NotFound,
    ObjectStore,
    StoreError,
    StoreRefused,
    StoreUnavailable,
    open_store,
)

__all__ = ["Exists", "NotFound", "ObjectStore", "StoreError", "StoreRefused", "StoreUnavailable", "open_store"]

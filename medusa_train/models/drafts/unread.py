"""The name under which drafts/eagle3.py imports `UnreadRows`."""

from medusa_train.models.drafts.layer_cache import UnreadRows as UnreadRows

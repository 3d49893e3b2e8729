"""Text to ids and back for every base, and the chat templates of the models themselves.

`from_gguf` and `from_folder` build one `Tokenizer` over the `tokenizers` library; a `ChatTemplate` renders messages.
"""

from graftune.tokenizer.core import Tokenizer
from graftune.tokenizer.folder import from_folder
from graftune.tokenizer.gguf_vocab import from_gguf
from graftune.tokenizer.template import ChatTemplate

__all__ = ["ChatTemplate", "Tokenizer", "from_folder", "from_gguf"]

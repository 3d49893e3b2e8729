"""The page that watches runs: a small web server over run folders, which it only reads.

Nothing here imports torch: the server stays small beside a training run, and a folder copied from another machine opens
where torch is not installed. A separate process answers the chat box (chat.py).
"""

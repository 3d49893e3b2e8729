"""The page that watches runs: a small web server over run folders, which it only reads.

Nothing here imports torch. The server has to stay small beside a training, and a folder copied from another machine
opens where there is no torch at all. Answers of the chat box come from a process of their own (chat.py).
"""

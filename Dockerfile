# graftune in a container, by the same two commands as everywhere else.
#
#   docker build -t graftune .
#   docker run --rm graftune                     make train: the bundled sample on the bundled base
#   docker run --rm graftune test                make test: lint, types and all tests
#   docker run --rm --gpus all -v "$PWD:/data" -w /data --entrypoint graftune graftune train BASE my.jsonl
#
# The full Python image rather than the slim one: make sets up, and Triton wants a C compiler on a GPU machine. torch's
# Linux wheel brings CUDA along, so the host needs only its driver. GPU=1: no GPU can be seen while an image is built.
FROM python:3.12
WORKDIR /graftune
COPY . .
RUN make setup GPU=1
ENV PATH="/graftune/.venv/bin:$PATH"
ENTRYPOINT ["make", "--directory=/graftune"]
CMD ["train"]

# The command line of Quark on CPUs.
#
#   docker build --tag quark .
#   docker run --rm --user "$(id -u)" --volume "$PWD:/data" quark quantize --model_dir MODEL …
#
# MODEL and the output are directories below the current one, which is /data in the container.
FROM python:3.12-slim

WORKDIR /source
COPY constraints.txt pyproject.toml README.md LICENSE ./
COPY quark quark
RUN pip install --no-cache-dir --extra-index-url https://download.pytorch.org/whl/cpu \
    --constraint constraints.txt ".[data,fast,gguf,onnx,media]" \
    && rm -r /source \
    && useradd --uid 1000 --create-home quark

# Any user may run it: caches go to a directory that all can write.
ENV HOME=/tmp USER=quark
USER 1000
WORKDIR /data
ENTRYPOINT ["quark"]
CMD ["--help"]

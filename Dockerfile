# One image for the head, for hosts that join, and for own training loops:
#
#     docker build -t distbelief .
#
# The default torch brings CUDA's libraries. For processors only:
#     docker build -t distbelief --build-arg TORCH="torch --index-url URL" .
# with the address of CPU-only builds that torch's download page names.
FROM python:3.11-slim

ARG TORCH="torch"
# hadolint ignore=DL3013,SC2086
RUN pip install --no-cache-dir ${TORCH}

COPY pyproject.toml README.md LICENSE /src/
COPY distbelief /src/distbelief
COPY sandblaster /src/sandblaster
RUN pip install --no-cache-dir /src && useradd --create-home --uid 1000 trainer \
    && install -d -o trainer /job /job/runs /keys

USER 1000
WORKDIR /job
ENTRYPOINT ["distbelief"]

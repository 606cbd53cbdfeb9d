# shellcheck shell=bash
# The training operator's manifests, from its Go module, as one YAML file.

# operator_manifests: copies the module's `manifests` folder to $CACHE and prints
# the path of its standalone overlay.
operator_manifests() {
  local target new
  target="$CACHE/training-operator-manifests-$(go_version training-operator)"
  if [[ ! -d $target ]]; then
    new=$(mktemp -d "$CACHE/manifests.XXXXXX")
    cp -r --no-preserve=mode "$(module_dir training-operator)/manifests/." "$new/"
    install_dir "$new" "$target"
  fi
  echo "$target/overlays/standalone"
}

#!/usr/bin/env bash
# Append lines to history.jsonl on the branch `history` of a repository, and push: `keep.sh REPOSITORY FILE`. The branch is made
# if it is absent. It holds that file alone, so it never meets a branch of the code.
set -euo pipefail
repository=$1 lines=$(realpath "$2")
git -C "$repository" config --get user.name > /dev/null || git -C "$repository" config user.name eagletwin
git -C "$repository" config --get user.email > /dev/null || git -C "$repository" config user.email eagletwin@localhost
scratch=$(mktemp -d)
trap 'git -C "$repository" worktree remove --force "$scratch/history" 2> /dev/null || true; rm -rf "$scratch"' EXIT
if git -C "$repository" fetch --quiet origin history 2> /dev/null; then
  git -C "$repository" worktree add --quiet --detach "$scratch/history" FETCH_HEAD
else
  git -C "$repository" worktree add --quiet --detach "$scratch/history"
  git -C "$scratch/history" checkout --quiet --orphan history-begins
  git -C "$scratch/history" rm --quiet -r --force .
fi
cat "$lines" >> "$scratch/history/history.jsonl"
git -C "$scratch/history" add history.jsonl
git -C "$scratch/history" commit --quiet --message "$(wc -l < "$scratch/history/history.jsonl") nights"
git -C "$scratch/history" push --quiet origin HEAD:refs/heads/history

# bash completion for vz. Install as
#   ~/.local/share/bash-completion/completions/vz
_vz() {
  local current=${COMP_WORDS[COMP_CWORD]} previous=${COMP_WORDS[COMP_CWORD-1]} verb='' word flags='--help --progress --version'
  for word in "${COMP_WORDS[@]:1:COMP_CWORD-1}"; do
    [[ $word == -- ]] && { _command_offset "$((COMP_CWORD))" 2>/dev/null; return; }
    case $word in up | exec | status | stop | delete) verb=$word; break ;; esac
  done
  case $previous in
    --progress) mapfile -t COMPREPLY < <(compgen -W 'auto tty plain json quiet' -- "$current"); return ;;
    -e | --environment) mapfile -t COMPREPLY < <(compgen -W "$(_vz_names environments)" -- "$current"); return ;;
    -m | --machine) mapfile -t COMPREPLY < <(compgen -W "$(_vz_names machines)" -- "$current"); return ;;
  esac
  case $verb in
    '') mapfile -t COMPREPLY < <(compgen -W "up exec status stop delete $flags" -- "$current"); return ;;
    up | delete) flags+=' --environment --json' ;;
    exec) flags+=' --environment --machine --interactive --tty --' ;;
    status) flags+=' --environment --machine --all --json' ;;
    stop) flags+=' --environment' ;;
  esac
  mapfile -t COMPREPLY < <(compgen -W "$flags" -- "$current")
}

# Names come from what vz itself says; without jq or an Environment there are
# none.
_vz_names() {
  case $1 in
    environments) vz status --all --json 2>/dev/null | jq -r '.environments[].name' 2>/dev/null ;;
    machines) vz status --json 2>/dev/null | jq -r '.machines[].name' 2>/dev/null ;;
  esac
}
complete -F _vz vz

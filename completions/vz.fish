# fish completion for vz. Put it into ~/.config/fish/completions.
set -l verbs up exec status stop delete
complete -c vz -f
complete -c vz -n "not __fish_seen_subcommand_from $verbs" -a up -d 'Create the Environment or make it what vz.json says'
complete -c vz -n "not __fish_seen_subcommand_from $verbs" -a exec -d 'Run a command in a Machine'
complete -c vz -n "not __fish_seen_subcommand_from $verbs" -a status -d 'Show what is recorded and how each Machine fares'
complete -c vz -n "not __fish_seen_subcommand_from $verbs" -a stop -d 'Stop every Machine; identity and state stay'
complete -c vz -n "not __fish_seen_subcommand_from $verbs" -a delete -d 'Take everything of the Environment away'
complete -c vz -l help -s h -d 'Show help'
complete -c vz -l version -d 'Print the version'
complete -c vz -l progress -x -a 'auto tty plain json quiet' -d 'How steps are shown'
complete -c vz -n "__fish_seen_subcommand_from $verbs" -l environment -s e -x -a '(vz status --all --json 2>/dev/null | jq -r ".environments[].name" 2>/dev/null)' -d 'The Environment'
complete -c vz -n "__fish_seen_subcommand_from exec status" -l machine -s m -x -a '(vz status --json 2>/dev/null | jq -r ".machines[].name" 2>/dev/null)' -d 'The Machine'
complete -c vz -n "__fish_seen_subcommand_from exec" -l interactive -s i -d 'Pass stdin on'
complete -c vz -n "__fish_seen_subcommand_from exec" -l tty -s t -d 'Give the command a terminal'
complete -c vz -n "__fish_seen_subcommand_from status" -l all -d 'Every Environment of this user'
complete -c vz -n "__fish_seen_subcommand_from up status delete" -l json -d 'Print JSON'

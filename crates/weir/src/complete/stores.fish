
# Stores and devices, which the definitions of the command line cannot name.
function __weir_stores
    set -l word (commandline -ct)
    switch $word
        case 'file:*' 'stripe:*' 'log:*'
            set -l kind (string split -m1 : $word)
            printf "$kind[1]:%s\n" (complete -C "'' $kind[2]" | string replace -r '\t.*' '')
        case '*'
            printf '%s\n' host: vram: file: stripe: sim:
            for card in /sys/class/drm/card*
                string match -rq '/card(?<number>\d+)$' $card; and echo vram:$number
            end
    end
end
complete -c weir -l store -x -a '(__weir_stores)'
complete -c weir -n '__fish_seen_subcommand_from attach' -l device -x -a '(printf "%s\n" /dev/nbd*)'
complete -c weir -n '__fish_seen_subcommand_from detach' -x -a '(printf "%s\n" /dev/nbd*)'


# Stores and devices, which the definitions of the command line cannot name.
_weir_keys() {
    case $1 in
    vram:*) echo size= chunk= floor= ring= path= window= engine_batch= ;;
    file:*) echo size= encrypt= overwrite= chunk= ;;
    stripe:*) echo size= encrypt= overwrite= chunk= unit= ;;
    esac
}
_weir_values() {
    local line=${COMP_LINE:0:COMP_POINT} word before cut head found=()
    word=${line##*[[:space:]]}
    line=${line%"$word"}
    read -ra before <<<"$line"
    before=${before[${#before[@]} - 1]}
    case $before in
    --store | --home | --backing)
        case $word in
        *\?*)
            head=${word%"${word##*[?&]}"}
            for cut in $(_weir_keys "$word"); do found+=("$head$cut"); done
            ;;
        vram:*)
            found=(vram:)
            for cut in /sys/class/drm/card[0-9]*; do
                [[ $cut =~ /card([0-9]+)$ ]] && found+=("vram:${BASH_REMATCH[1]}")
            done
            ;;
        file:* | stripe:* | log:*)
            head=${word%"${word##*[:,]}"}
            while read -r cut; do found+=("$head$cut"); done < <(compgen -f -- "${word##*[:,]}")
            ;;
        *)
            if [[ $before == --store ]]; then
                found=(host: vram: file: stripe: sim:)
            else
                [[ $before == --home ]] && found=(log:)
                while read -r cut; do found+=("$cut"); done < <(compgen -f -- "$word")
            fi
            ;;
        esac
        ;;
    --device | detach)
        for cut in /dev/nbd[0-9]*; do [[ -e $cut ]] && found+=("$cut"); done
        ;;
    *) _weir "$@"; return ;;
    esac
    mapfile -t COMPREPLY < <(compgen -W "${found[*]}" -- "$word")
    [[ ${COMPREPLY[*]} == *[:=/?] ]] && compopt -o nospace 2>/dev/null
    # Readline has cut the word at `:` and `=`, and replaces the last piece only.
    if [[ $word == *[:=]* && $COMP_WORDBREAKS == *[:=]* ]]; then
        head=${word%"${word##*[:=]}"}
        COMPREPLY=("${COMPREPLY[@]#"$head"}")
    fi
}
complete -F _weir_values -o bashdefault weir

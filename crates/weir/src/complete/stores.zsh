
# Stores, which the definitions of the command line cannot name.
_weir_stores() {
    if compset -P '(file|stripe|log):(*,|)'; then
        _files
    else
        local -a stores cards
        cards=(/sys/class/drm/card<->(N:t))
        stores=(host: vram: file: stripe: sim: vram:${^cards#card})
        compadd -S '' -- $stores
    fi
}

# bash completion for perf-trampoline(1).  Lib/test/test_perf_cli.py checks the options against the command's own.

_perf_trampoline() {
    local cur=${COMP_WORDS[COMP_CWORD]} prev=${COMP_WORDS[COMP_CWORD-1]} command=${COMP_WORDS[1]} words
    local input='--input --perf --hide --no-native --interpreter'
    COMPREPLY=()
    if ((COMP_CWORD == 1)); then
        COMPREPLY=($(compgen -W 'record report flamegraph doctor clean status --help --version' -- "$cur"))
        return
    fi
    case $command:$prev in
        record:-m) return ;;
        *:--call-graph) words='fp dwarf' ;;
        *:--backend) words='perf perf_jit perf_elf' ;;
        *:--by) words='function file module' ;;
        *:--sort) words='self total' ;;
        *:--hide) words='native kernel' ;;
        *:--format) words='html speedscope firefox pprof folded' ;;
        *:--user) COMPREPLY=($(compgen -u -W all -- "$cur")); return ;;
        *:--images|*:--proc) COMPREPLY=($(compgen -d -- "$cur")); return ;;
        *:--pid|*:-p) words=$(cd /proc && echo [0-9]*) ;;
        *)
            case $command in
                record) words='-m -c --pid --python --output --freq --event --call-graph --backend --images --duration --perf --dry-run --quiet --json' ;;
                report) words="$input --by --sort --diff --min --depth --json" ;;
                flamegraph) words="$input --output --format --title" ;;
                doctor) words='--python --perf --images --pid --json --proc' ;;
                clean) words='--days --user --dry-run --json' ;;
                status) words='--json' ;;
            esac
            words+=' --help --version'
            if [[ $cur != -* ]]; then
                COMPREPLY=($(compgen -f -- "$cur"))
                return
            fi ;;
    esac
    COMPREPLY=($(compgen -W "$words" -- "$cur"))
}
complete -o filenames -F _perf_trampoline perf-trampoline

#!/bin/sh
# Runs mlx.launch with these arguments as a service, which mlx.launch alone is not fit for:
# - It ends with 0 when a rank fails. This ends with 75 then, so that a supervisor restarts all.
# - It leaves its ranks running when it receives SIGTERM. This passes the signal to the ranks of
#   this machine: rank 0 lets requests finish, and then stops the others. It does not go to
#   ssh clients: when one ends, the launcher sends rank 0 a second signal, which ends its requests.
# - It reads the end of /dev/null over and over as its standard input. This gives it a pipe.
#
# LAUNCHER is the command, if mlx.launch is not on the path.
launcher=
stopped=
stop() {
    stopped=yes
    test -n "$launcher" || return 0
    ranks=
    children=$(pgrep -P "$launcher")
    for child in $children; do
        case $(ps -o comm= -p "$child") in
            *ssh) ;;
            *) ranks="$ranks $child" ;;
        esac
    done
    # A rank 0 that ssh has started ends when the connection does. A launcher without ranks, which
    # has only just started, ends by itself.
    kill -TERM ${ranks:-${children:-$launcher}}
}
trap stop TERM INT
pipe=$(mktemp -u) && mkfifo -m 600 "$pipe" && exec 3<>"$pipe" && rm "$pipe" || exit 1
"${LAUNCHER:-mlx.launch}" "$@" <&3 &
launcher=$!
# A signal that came before the launcher had a process ID has stopped nothing yet.
test -z "$stopped" || stop
# A signal interrupts wait.
while kill -0 "$launcher" 2>/dev/null; do
    wait "$launcher"
done
test -n "$stopped" || exit 75

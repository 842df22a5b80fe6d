#!/usr/bin/env bash
# rank.sh COMMAND...: run the command of a rank.  If a signal ends it, name the rank, because mpiexec
# names only the process.
exec 3>&2
status=0
{ "$@" 2>&3 3>&-; } 2>/dev/null || status=$? # not what bash itself says of the signal
if ((status > 128)) && signal=$(kill -l "$status" 2>/dev/null); then
  echo "emulate.sh: rank ${PMI_RANK:-?} on $(</proc/sys/kernel/hostname) ended by SIG$signal" >&2
  kill -"$signal" $$ # mpiexec ends the job for a signal, not for an exit code
fi
exit "$status"

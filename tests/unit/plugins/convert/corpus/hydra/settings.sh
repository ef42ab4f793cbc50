# A file that verl_settings.sh sources.
export LR=5e-6
TEMPERATURE=0.4
if [ -z "$LR" ]; then return; fi
